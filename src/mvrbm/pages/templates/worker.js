// Code of the workers, which is appended to stages.js. The main worker receives a photograph and starts helpers, which
// are workers with the same code that compute bands of patches in parallel.
let enlarger;

onmessage = async ({ data }) => {
  if (data.model) enlarger = new Enlarger(data.model);
  if (data.picture) {
    const result = await enlarger.picture(data.picture, startHelpers(data));
    postMessage({ result }, [result.better.buffer, result.bicubic.buffer]);
  } else if (data.image) {
    let rows = 0;
    let reported = performance.now();
    const band = enlarger.stages[data.stage].band(data.image, data.first, data.last, () => {
      rows += 1;
      // Sending one message per row would slow down the page.
      if (performance.now() - reported < 50) return;
      postMessage({ rows });
      rows = 0;
      reported = performance.now();
    });
    postMessage({ rows, band }, [band.data.buffer]);
  }
};

// Starts the helpers. Returns a function that computes one band of a stage per helper and reports progress to the page.
function startHelpers({ model, code, count }) {
  // A page that is opened from a file has no origin, so workers cannot use its URLs and create their own.
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const helpers = Array.from({ length: count }, () => new Worker(url));
  for (const helper of helpers) helper.postMessage({ model });
  return async (stage, image) => {
    const rows = enlarger.stages[stage].count(image.height);
    const ends = [...helpers.keys(), count].map((n) => Math.round((n * rows) / count));
    let done = 0;
    const bands = helpers.map((helper, n) => new Promise((resolve) => {
      helper.onmessage = ({ data }) => {
        done += data.rows;
        postMessage({ share: (stage + done / rows) / model.stages.length });
        if (data.band) resolve(data.band);
      };
      helper.postMessage({ stage, image, first: ends[n], last: ends[n + 1] });
    }));
    return Promise.all(bands);
  };
}
