// The page starts with a blank image, all pixels of which are known. Users draw on it, free a part of it or all that
// they did not draw, and run the machine, which draws the free pixels.
"use strict";

const model = JSON.parse(document.getElementById("model").textContent);
const machine = new Machine(model);
const [rows, columns] = model.visible.shape;
const [low, high] = model.visible.range;
const starts = model.starts && split(decode(model.starts.visible), machine.visible.size);
// Steps per second. Infinity means as many steps as fit in a frame.
const SPEEDS = [1, 2, 5, 10, 30, 60, Infinity];
// Computing time per frame, which keeps the page responsive.
const FRAME_MS = 12;
// How long the machine runs at full speed after a stroke.
const HURRY_MS = 800;
const SHOWN_FILTERS = 8;
// Number of steps in the plot of the free energy.
const SHOWN_ENERGIES = 200;

const byId = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const choose = (name, value) => (document.querySelector(`input[name="${name}"][value="${value}"]`).checked = true);
const say = (text) => (byId("status").textContent = text);

let state;
let running = false;
let heldLabel = -1;
let energies = [];
let unit = 0;
// Who determines a pixel: the machine, a user who drew or kept it, or the blank canvas.
const [FREE, DRAWN, CANVAS] = [0, 1, 2];
const known = new Uint8Array(machine.visible.size);
const cursor = { row: rows >> 1, column: columns >> 1 };

function split(array, length) {
  return Array.from({ length: array.length / length }, (_, n) => array.subarray(n * length, (n + 1) * length));
}

// -- running the machine -----------------------------------------------------------------------------------------------

function stepOnce() {
  machine.step(state, {
    known, heldLabel, beta: 1 / byId("temperature").valueAsNumber, sampled: chosen("method") === "gibbs",
  });
}

// Starts with a blank image that is known, so that it and what is drawn on it are all that the machine sees.
function clear() {
  setRunning(false);
  known.fill(CANVAS);
  heldLabel = -1;
  choose("brush", "high");
  const blank = new Float64Array(known.length).fill(low);
  state = machine.start(blank, machine.label && machine.labelProbabilities(blank));
  energies = [];
  draw();
  say(model.frame ? "Draw inside the dashed frame." : "Draw on the image.");
}

// Frees the pixels that nobody drew, and runs the machine.
function complete() {
  if (known.includes(CANVAS) && !known.includes(DRAWN)) return say("Draw something first.");
  known.forEach((who, i) => (known[i] = who === CANVAS ? FREE : who));
  if (!known.includes(FREE)) return say("All pixels are kept. Free some with the brush, and the model fills them in.");
  nearest();
}

// Starts from a training chain if available, because sampling an image from noise takes a long time. If a class is selected,
// the chain belongs to that class.
function newSample() {
  const rowsOf = starts?.map((_, n) => n).filter((n) => heldLabel < 0 || model.starts.labels[n] === heldLabel) ?? [];
  const from = rowsOf[Math.floor(Math.random() * rowsOf.length)];
  const label = machine.label && from !== undefined ? oneHot(model.starts.labels[from], machine.label.size) : null;
  known.fill(FREE);
  state = machine.start(starts?.[from], label);
  for (let n = 0; n < 20; n++) stepOnce(); // move away from the stored chain
  energies = [];
  draw();
}

// Called when pixels have been drawn or freed. The candidates are the image and the stored chains, each with the kept pixels inserted. The
// machine continues from the most probable candidate, because an image that does not fit the stroke would adapt slowly.
function nearest() {
  const candidates = [state.x, ...(starts ?? [])].map((x) => x.map((value, i) => (known[i] ? state.x[i] : value)));
  const held = heldLabel < 0 ? null : oneHot(heldLabel, machine.label.size);
  const costs = candidates.map((x) => machine.freeEnergy(x, held));
  const best = costs.indexOf(Math.min(...costs));
  const label = machine.label && (held ?? machine.label.sample(machine.labelProbabilities(candidates[best])));
  state = machine.start(candidates[best], label);
  hurry = performance.now() + HURRY_MS;
  setRunning(true);
  const kept = known.filter((who) => who !== FREE).length;
  say(`The model keeps ${kept} pixels and draws the other ${known.length - kept}.`);
}

function setRunning(on) {
  running = on && known.includes(FREE);
  byId("run").textContent = running ? "Pause" : "Run";
  if (running) schedule();
}

// Schedule at most one frame, so that pausing and resuming within a frame does not start a second animation loop.
let waiting = false;
function schedule() {
  if (!waiting) requestAnimationFrame(frame);
  waiting = true;
}

// Number of steps that are due.
let due = 0;
// Time until which the machine runs at full speed.
let hurry = 0;
// Time of the previous frame.
let before = null;
function frame(now) {
  waiting = false;
  if (!running) return (before = null);
  const speed = now < hurry ? Infinity : SPEEDS[byId("speed").valueAsNumber];
  due = speed === Infinity ? Infinity : Math.min(due, 1) + (speed * Math.min(now - (before ?? now), 1000)) / 1000;
  before = now;
  const end = performance.now() + FRAME_MS;
  let stepped = false;
  while (due >= 1 && performance.now() < end) {
    stepOnce();
    due -= 1;
    stepped = true;
  }
  if (stepped) draw();
  schedule();
}

// -- drawing the state -------------------------------------------------------------------------------------------------

let colors;
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(`--${name}`).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  const names = ["paper", "ink", "kept-blank", "kept", "dark", "light", "kept-dark", "kept-light"];
  names.push("glow", "off", "on", "positive", "negative", "middle", "accent");
  colors = Object.fromEntries(names.map((name) => [name, rgb(name)]));
}

const mix = (from, to, share) => from.map((part, i) => part + (to[i] - part) * Math.min(Math.max(share, 0), 1));

// Paints an array onto a canvas and returns the size of an entry in canvas pixels.
function paint(canvas, height, width, colorOf) {
  const scale = Math.max(1, Math.floor(560 / Math.max(height, width)));
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const pixels = new ImageData(width, height);
  for (let i = 0; i < height * width; i++) {
    pixels.data.set(colorOf(i), 4 * i);
    pixels.data[4 * i + 3] = 255;
  }
  const small = new OffscreenCanvas(width, height);
  small.getContext("2d").putImageData(pixels, 0, 0);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  return scale;
}

function outline(canvas, scale, row, column) {
  const context = canvas.getContext("2d");
  context.strokeStyle = `rgb(${colors.glow})`;
  context.lineWidth = Math.max(2, scale / 6);
  context.strokeRect(column * scale, row * scale, scale, scale);
}

// Colors of the lowest and the highest value, for other pixels and for those that a user drew or kept. Binary images look like ink on paper.
const SHADES = machine.visible.kind === "bernoulli"
  ? [["paper", "ink"], ["kept-blank", "kept"]] : [["dark", "light"], ["kept-dark", "kept-light"]];

function drawPicture() {
  const shown = byId("probabilities").checked ? state.mean : state.x;
  const scale = paint(byId("picture"), rows, columns, (i) => {
    const share = (shown[i] - low) / (high - low);
    const [from, to] = SHADES[Number(known[i] === DRAWN)];
    return mix(colors[from], colors[to], share);
  });
  if (model.frame && isBlank()) drawFrame(scale);
  if (byId("picture").matches(":focus-visible")) outline(byId("picture"), scale, cursor.row, cursor.column);
}

const isBlank = () => known.every((who) => who === CANVAS);

// Shows on a blank image where the images of the training chains lie.
function drawFrame(scale) {
  const [top, left, bottom, right] = model.frame.map((edge) => edge * scale);
  const context = byId("picture").getContext("2d");
  context.strokeStyle = `rgb(${mix(colors.paper, colors.ink, 0.3)})`;
  context.lineWidth = 2;
  context.setLineDash([scale / 2, scale / 2]);
  context.strokeRect(left, top, right - left, bottom - top);
  context.setLineDash([]);
}

// A hidden layer that is not a matrix is shown as an approximately square matrix.
const hiddenShape = model.hidden.shape;
const hiddenColumns = hiddenShape.length === 2 ? hiddenShape[1] : Math.ceil(Math.sqrt(machine.hidden.size));
const hiddenRows = Math.ceil(machine.hidden.size / hiddenColumns);

function drawHidden() {
  const binary = machine.hidden.kind === "bernoulli";
  const scale = paint(byId("hidden"), hiddenRows, hiddenColumns, (i) => {
    const activity = state.hidden[i] ?? 0;
    if (binary) return mix(colors.off, colors.on, activity);
    return mix(colors.middle, activity < 0 ? colors.negative : colors.positive, Math.abs(activity) / 3);
  });
  outline(byId("hidden"), scale, Math.floor(unit / hiddenColumns), unit % hiddenColumns);
}

function drawFilter(canvas, number) {
  const filter = machine.filter(number);
  const largest = filter.reduce((most, weight) => Math.max(most, Math.abs(weight)), 1e-12);
  paint(canvas, rows, columns, (i) =>
    mix(colors.middle, filter[i] < 0 ? colors.negative : colors.positive, Math.abs(filter[i]) / largest));
}

function drawUnit() {
  drawFilter(byId("filter"), unit);
  const row = Math.floor(unit / hiddenColumns) + 1;
  const column = (unit % hiddenColumns) + 1;
  const place = hiddenShape.length === 2 ? `${row}, ${column}` : unit + 1;
  byId("unit").textContent = `Filter of unit ${place}, with activity ${state.hidden[unit].toFixed(2)}`;
}

// Shows the filters of the units with the largest fields. Updates are rare, because each filter requires a pass down.
let stripDue = 0;
function drawStrip() {
  if (performance.now() < stripDue) return;
  stripDue = performance.now() + 700;
  const field = machine.hiddenField(state.x, state.label);
  const best = [...field.keys()].sort((a, b) => field[b] - field[a]).slice(0, SHOWN_FILTERS);
  [...byId("strip").children].forEach((button, n) => {
    if (button.dataset.unit === String(best[n])) return;
    button.dataset.unit = best[n];
    button.setAttribute("aria-label", `Select hidden unit ${best[n] + 1}`);
    drawFilter(button.firstChild, best[n]);
  });
}

function drawEnergy() {
  const energy = machine.freeEnergy(state.x);
  energies = [...energies, energy].slice(-SHOWN_ENERGIES);
  byId("energy").textContent = energy.toFixed(1).replace("-", "−");
  const canvas = byId("trace");
  const ratio = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const least = Math.min(...energies);
  const most = Math.max(...energies);
  const context = canvas.getContext("2d");
  context.strokeStyle = `rgb(${colors.accent})`;
  context.lineWidth = 2 * ratio;
  context.lineJoin = "round";
  context.beginPath();
  energies.forEach((value, n) => {
    const height = (value - least) / (most - least || 1);
    context.lineTo(2 + ((canvas.width - 4) * n) / (SHOWN_ENERGIES - 1), (1 - 0.84 * height - 0.08) * canvas.height);
  });
  context.stroke();
}

// Returns a copy of a drawing whose ink is moved so that its center of mass is where that of training images is. Without
// such a place, returns the drawing.
function centered(x) {
  if (!model.center) return x;
  const ink = [...x.keys()].filter((i) => x[i]).map((i) => [Math.floor(i / columns), i % columns]);
  const [down, right] = [rows, columns].map((length, axis) => {
    const places = ink.map((place) => place[axis]);
    const wanted = Math.round(model.center[axis] - sum(places) / places.length);
    return Math.min(Math.max(wanted, -Math.min(...places)), length - 1 - Math.max(...places)); // no ink leaves the image
  });
  const moved = new Float64Array(x.length);
  for (const [row, column] of ink) moved[(row + down) * columns + column + right] = 1;
  return moved;
}

function drawLabels() {
  if (!machine.label) return;
  const drawing = known.includes(CANVAS);
  const blank = isBlank();
  const shares = machine.labelProbabilities(drawing && !blank ? centered(state.x) : state.x);
  const percent = (share) => `${Math.round(100 * share)}%`;
  [...byId("labels").children].forEach((button, n) => {
    button.setAttribute("aria-pressed", n === heldLabel);
    button.querySelector("small").textContent = blank ? "" : percent(shares[n]);
    button.querySelector("i").style.width = blank ? 0 : `${100 * shares[n]}%`;
  });
  const best = shares.indexOf(Math.max(...shares));
  const answer = document.createElement("b");
  answer.textContent = model.label.classes[best];
  if (blank) byId("reading").textContent = "Nothing is drawn.";
  else byId("reading").replaceChildren(drawing ? "Your drawing: " : "This image: ", answer, ` (${percent(shares[best])})`);
}

function draw() {
  drawPicture();
  drawHidden();
  drawUnit();
  drawStrip();
  drawEnergy();
  drawLabels();
  byId("run").disabled = byId("step").disabled = !known.includes(FREE);
}

// -- painting ----------------------------------------------------------------------------------------------------------

// Who determines a pixel after it was painted. Painting a pixel blank where nothing else is free erases ink.
function owner(before, brush) {
  if (brush === "free") return FREE;
  return brush === "low" && before !== FREE && known.includes(CANVAS) ? CANVAS : DRAWN;
}

function stamp(row, column) {
  const brush = chosen("brush");
  const radius = byId("width").valueAsNumber / 2;
  // The center of a brush of even width lies between pixels.
  for (let r = Math.ceil(row - radius); r < row + radius; r++) {
    for (let c = Math.ceil(column - radius); c < column + radius; c++) {
      if (r < 0 || c < 0 || r >= rows || c >= columns) continue;
      const i = r * columns + c;
      known[i] = owner(known[i], brush);
      if (known[i]) state.x[i] = state.mean[i] = brush === "high" ? high : low;
    }
  }
}

function line(from, to) {
  const length = Math.max(1, Math.ceil(2 * Math.hypot(to.row - from.row, to.column - from.column)));
  for (let n = 0; n <= length; n++) {
    const share = n / length;
    stamp(from.row + share * (to.row - from.row), from.column + share * (to.column - from.column));
  }
  if (machine.label && !known.includes(FREE)) state.label = machine.labelProbabilities(state.x);
  state.hidden = machine.hiddenMean(state.x, state.label);
  draw();
}

// Called after a stroke. While nothing is free, there is nothing to fill in.
function strokeEnds() {
  if (known.includes(FREE)) nearest();
  else say("Complete your drawing, or go on.");
}

function place(canvas, event, height, width) {
  const box = canvas.getBoundingClientRect();
  return {
    row: ((event.clientY - box.top) / box.height) * height - 0.5,
    column: ((event.clientX - box.left) / box.width) * width - 0.5,
  };
}

let last = null; // the previous position of the pointer while it paints, otherwise null
byId("picture").addEventListener("pointerdown", (event) => {
  event.target.setPointerCapture(event.pointerId);
  last = place(event.target, event, rows, columns);
  line(last, last);
});
byId("picture").addEventListener("pointermove", (event) => {
  if (!last) return;
  const here = place(event.target, event, rows, columns);
  line(last, here);
  last = here;
});
for (const name of ["pointerup", "pointercancel"]) {
  byId("picture").addEventListener(name, () => {
    last = null;
    strokeEnds();
  });
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const within = (value, length) => Math.min(Math.max(value, 0), length - 1);

byId("picture").addEventListener("keydown", (event) => {
  const move = ARROWS[event.key];
  if (!move && event.key !== " ") return;
  event.preventDefault();
  const from = { ...cursor };
  if (move) {
    cursor.row = within(cursor.row + move[0], rows);
    cursor.column = within(cursor.column + move[1], columns);
  }
  if (event.key === " " || event.shiftKey) {
    line(from, cursor);
    strokeEnds();
  } else {
    drawPicture();
    say(`Row ${cursor.row + 1}, column ${cursor.column + 1}`);
  }
});
for (const name of ["focus", "blur"]) byId("picture").addEventListener(name, drawPicture);

// -- the other controls ------------------------------------------------------------------------------------------------

function chooseUnit(number) {
  unit = within(number, machine.hidden.size);
  drawHidden();
  drawUnit();
}

byId("hidden").addEventListener("pointerdown", (event) => {
  const { row, column } = place(event.target, event, hiddenRows, hiddenColumns);
  chooseUnit(Math.round(row) * hiddenColumns + Math.round(column));
});
byId("hidden").addEventListener("keydown", (event) => {
  const move = ARROWS[event.key];
  if (!move) return;
  event.preventDefault();
  chooseUnit(unit + move[0] * hiddenColumns + move[1]);
  say(byId("unit").textContent);
});

byId("run").addEventListener("click", () => setRunning(!running));
byId("step").addEventListener("click", () => {
  setRunning(false);
  stepOnce();
  draw();
});
byId("new").addEventListener("click", () => {
  newSample();
  say("New sample. All pixels are free.");
});
byId("complete").addEventListener("click", complete);
byId("clear").addEventListener("click", clear);
byId("keep").addEventListener("click", () => {
  known.fill(DRAWN);
  // Keep the means of real-valued pixels if they are shown. Binary pixels cannot be probabilities, so keep the samples.
  if (machine.visible.kind !== "bernoulli" && byId("probabilities").checked) state.x.set(state.mean);
  choose("brush", "free");
  state.mean = Float64Array.from(state.x);
  setRunning(false);
  draw();
  say("All pixels are kept. Free some with the brush, and the model fills them in.");
});
byId("probabilities").addEventListener("change", drawPicture);

function holdLabel(number) {
  heldLabel = heldLabel === number ? -1 : number;
  if (known.includes(DRAWN)) complete();
  else if (heldLabel >= 0) newSample(); // nothing is drawn, so start from an image of the class
  draw();
  setRunning(true);
  if (!known.includes(FREE)) return;
  say(heldLabel < 0 ? "Any class." : `Only class ${model.label.classes[heldLabel]}.`);
}

(model.label?.classes ?? []).forEach((name, number) => {
  const button = document.createElement("button");
  const title = document.createElement("span");
  title.append(name);
  button.append(title, document.createElement("small"), document.createElement("i"));
  button.addEventListener("click", () => holdLabel(number));
  byId("labels").append(button);
});

for (let n = 0; n < Math.min(SHOWN_FILTERS, machine.hidden.size); n++) {
  const button = document.createElement("button");
  button.append(document.createElement("canvas"));
  button.addEventListener("click", () => chooseUnit(Number(button.dataset.unit)));
  byId("strip").append(button);
}

const SHOWN = {
  width: (value) => `${value} px`,
  speed: (value) => (SPEEDS[value] === Infinity ? "max" : SPEEDS[value]),
  temperature: (value) => Number(value).toFixed(2),
};
for (const [id, text] of Object.entries(SHOWN)) {
  const show = () => (byId(id).nextElementSibling.textContent = text(byId(id).value));
  byId(id).addEventListener("input", show);
  show();
}

window.addEventListener("themechange", () => {
  readColors();
  stripDue = 0;
  for (const button of byId("strip").children) delete button.dataset.unit;
  draw();
});

readColors();
clear();
chooseUnit(Number(byId("strip").firstChild.dataset.unit));
