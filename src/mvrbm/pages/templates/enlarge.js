// Reads a photograph, sends it to a worker, and shows the result next to bicubic interpolation.
"use strict";

const models = JSON.parse(document.getElementById("models").textContent);
// Maximum size of a photograph. Only the middle of larger photographs is enlarged.
const MAX_PIXELS = 2 ** 18;
const MAX_HELPERS = 8;
const byId = (id) => document.getElementById(id);
const say = (text) => (byId("status").textContent = text);

// The photograph, {width, height, data, cropped}, with data in RGBA bytes.
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
  picture = { ...imageOf(context, width, height), cropped: share < 1 };
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
    say(`${part}${picture.width} × ${picture.height} → ${result.width} × ${result.height} pixels in ${seconds} s.`);
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
  // Show small results with larger pixels.
  byId("compare").style.width = `${width * Math.max(1, Math.floor(480 / width))}px`;
  for (const [id, data] of [["after", better], ["before", bicubic]]) {
    Object.assign(byId(id), { width, height });
    byId(id).getContext("2d").putImageData(new ImageData(data, width, height), 0, 0);
  }
  byId("result").hidden = false;
  byId("save").disabled = false;
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
byId("example").addEventListener("click", async () => {
  const bytes = Uint8Array.from(atob(EXAMPLE.split(",")[1]), (letter) => letter.charCodeAt(0));
  await read(new Blob([bytes], { type: "image/png" }), "the example");
});
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
