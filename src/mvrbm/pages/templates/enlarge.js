// Reads a photograph, sends it to a worker, and shows the result next to bicubic interpolation.
"use strict";

const models = JSON.parse(document.getElementById("models").textContent);
// Maximum size of a photograph. Only the middle of larger photographs is enlarged.
const MAX_PIXELS = 2 ** 18;
const MAX_HELPERS = 8;
const byId = (id) => document.getElementById(id);
const say = (text) => (byId("status").textContent = text);

// The photograph, {width, height, data, cropped, note}, with data in RGBA bytes.
let picture = null;
let worker = null;

// The page contains the worker's code, so no other file is required.
const code = byId("engine").textContent + byId("worker").textContent;
const workerUrl = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));

async function read(blob, name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    return say(`This browser cannot read ${name} as an image.`);
  }
  const share = Math.min(1, Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height)));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.floor(side * share)));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, (width - bitmap.width) >> 1, (height - bitmap.height) >> 1);
  const note = blob.type === "image/jpeg" ? " JPEG artifacts are enlarged, too; mvrbm superres removes them." : "";
  picture = { ...imageOf(context, width, height), cropped: share < 1, note };
  enlarge();
}

function imageOf(context, width, height) {
  return { width, height, data: context.getImageData(0, 0, width, height).data };
}

function enlarge() {
  if (!picture) return;
  stop();
  const scale = Number(document.querySelector('input[name="scale"]:checked').value);
  const began = performance.now();
  worker = new Worker(workerUrl);
  byId("stop").disabled = false;
  byId("progress").value = 0;
  say("Enlarging …");
  worker.onmessage = ({ data: { share, result } }) => {
    if (!result) return (byId("progress").value = share);
    stop();
    byId("progress").value = 1;
    show(result);
    const part = picture.cropped ? "The middle of the photograph, " : "";
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    say(`${part}${picture.width} × ${picture.height} → ${result.width} × ${result.height} pixels in ${seconds} s.${picture.note}`);
  };
  worker.onerror = (event) => {
    stop();
    say(`Enlarging failed: ${event.message}`);
  };
  const count = Math.min(navigator.hardwareConcurrency || 2, MAX_HELPERS);
  worker.postMessage({ model: models.find((each) => each.scale === scale), picture, code, count });
}

function stop() {
  worker?.terminate();
  worker = null;
  byId("stop").disabled = true;
}

function show({ width, height, better, bicubic }) {
  byId("result").hidden = false;
  byId("save").disabled = false;
  for (const [id, image] of [
    ["original", picture], ["after", { data: better, width, height }], ["before", { data: bicubic, width, height }],
  ]) {
    Object.assign(byId(id), { width: image.width, height: image.height });
    byId(id).getContext("2d").putImageData(new ImageData(image.data, image.width, image.height), 0, 0);
  }
  setZoom();
}

// Shows the photograph and all enlargements at the same zoom, so that their size relations are true. If possible, the
// zoom is a whole number at which the photograph and its largest enlargement fit side by side. On a narrow page, images
// shrink a little, rather than scroll.
function setZoom() {
  if (!picture) return;
  const room = byId("result").clientWidth - 2;
  const largest = picture.width * Math.max(...models.map((each) => each.scale));
  const shrunk = room < largest && room > 0.75 * largest;
  const zoom = shrunk ? room / largest : Math.max(1, Math.floor((room - 32) / (picture.width + largest)));
  byId("original").style.width = `${picture.width * zoom}px`;
  byId("compare").style.width = `${byId("after").width * zoom}px`;
  byId("result").style.setProperty("--rendering", shrunk ? "auto" : "pixelated");
  byId("zoom").textContent = `Both images are shown at ${Math.round(100 * zoom)}% of their size.`;
}

function compareAt(percent) {
  const inside = Math.min(Math.max(percent, 0), 100);
  byId("at").value = inside;
  byId("at").nextElementSibling.textContent = `${Math.round(inside)}%`;
  byId("compare").style.setProperty("--at", `${inside}%`);
}

byId("at").addEventListener("input", () => compareAt(byId("at").valueAsNumber));
for (const name of ["pointerdown", "pointermove"]) {
  byId("compare").addEventListener(name, (event) => {
    const box = byId("compare").getBoundingClientRect();
    if (event.buttons) compareAt((100 * (event.clientX - box.left)) / box.width);
  });
}

byId("file").addEventListener("change", ({ target }) => target.files[0] && read(target.files[0], target.files[0].name));
function readExample() {
  const bytes = Uint8Array.from(atob(EXAMPLE.split(",")[1]), (letter) => letter.charCodeAt(0));
  return read(new Blob([bytes], { type: "image/png" }), "the example");
}

byId("example").addEventListener("click", readExample);
for (const input of document.querySelectorAll('input[name="scale"]')) input.addEventListener("change", enlarge);
byId("stop").addEventListener("click", () => {
  stop();
  say("Stopped.");
});
byId("save").addEventListener("click", async () => {
  const link = document.createElement("a");
  const blob = await new Promise((done) => byId("after").toBlob(done));
  Object.assign(link, { href: URL.createObjectURL(blob), download: "enlarged.png" });
  link.click();
  URL.revokeObjectURL(link.href);
});

// A photograph can be dropped anywhere, or pasted.
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
for (const name of ["dragleave", "drop"]) {
  document.addEventListener(name, () => byId("drop").classList.remove("over"));
}
document.addEventListener("drop", (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (file) read(file, file.name);
});
document.addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  if (file) read(file, "the pasted file");
});

compareAt(50);
window.addEventListener("resize", setZoom);
readExample();
