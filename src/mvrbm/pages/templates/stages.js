// Enlarges a photograph in stages, inside a worker. This file does not access the page.
//
// An image is {height, width, data}, with one channel in a Float64Array where 1 is white. A stage predicts the details
// that are missing from an image. For each patch, it computes the means of the hidden units given the patch, and then
// the mean of the missing details given the hidden means.
"use strict";

const emptyImage = (height, width) => ({ height, width, data: new Float64Array(height * width) });

// -- bicubic resampling, as in mvrbm.vision.resampling -----------------------------------------------------------------

function cubic(distance) {
  const d = Math.abs(distance);
  if (d <= 1) return 1.5 * d ** 3 - 2.5 * d ** 2 + 1;
  return d < 2 ? -0.5 * d ** 3 + 2.5 * d ** 2 - 4 * d + 2 : 0;
}

// Returns the filter taps for a line of pixels: for each output, a Map from inputs to weights. Edge pixels are repeated
// beyond the ends of the line.
function taps(outputs, inputs, reach, weightOf) {
  return Array.from({ length: outputs }, (_, output) => {
    const found = new Map();
    for (const place of reach(output)) {
      const weight = weightOf(place, output);
      const inside = Math.min(Math.max(place, 0), inputs - 1);
      if (weight) found.set(inside, (found.get(inside) ?? 0) + weight);
    }
    return found;
  });
}

const span = (from, to) => Array.from({ length: to - from }, (_, n) => from + n);

const enlargingTaps = (size, scale) =>
  taps(size * scale, size, (j) => span(Math.floor(j / scale) - 2, Math.floor(j / scale) + 3),
    (place, j) => cubic(place - (j - (scale - 1) / 2) / scale));

const reducingTaps = (size, scale) =>
  taps(size, size * scale, (i) => span(scale * i - 2 * scale, scale * i + 3 * scale),
    (place, i) => cubic((place - scale * i - (scale - 1) / 2) / scale) / scale);

// Returns the filter taps for two consecutive resamplings.
function composed(after, first) {
  return after.map((row) => {
    const found = new Map();
    for (const [middle, outer] of row) {
      for (const [input, inner] of first[middle]) found.set(input, (found.get(input) ?? 0) + outer * inner);
    }
    return found;
  });
}

function resample(image, rows, columns) {
  const tall = emptyImage(rows.length, image.width);
  rows.forEach((row, i) => {
    for (const [from, weight] of row) {
      for (let j = 0; j < image.width; j++) {
        tall.data[i * image.width + j] += weight * image.data[from * image.width + j];
      }
    }
  });
  const result = emptyImage(rows.length, columns.length);
  columns.forEach((column, j) => {
    for (const [from, weight] of column) {
      for (let i = 0; i < rows.length; i++) {
        result.data[i * columns.length + j] += weight * tall.data[i * image.width + from];
      }
    }
  });
  return result;
}

class Resampler {
  constructor(height, width, scale) {
    const both = (kind) => [kind(height, scale), kind(width, scale)];
    this.enlarging = both(enlargingTaps);
    this.reducing = both(reducingTaps);
    this.thereAndBack = this.reducing.map((reduce, axis) => composed(reduce, this.enlarging[axis]));
  }

  enlarge(image) {
    return resample(image, ...this.enlarging);
  }

  // Back-projection: makes a large image H consistent with the small image L by H <- H + E (L - D H), `rounds` times. E
  // enlarges and D reduces. Every added term is an enlarged image, so all rounds can be computed at low resolution.
  backProject(low, high, rounds) {
    const reduced = resample(high, ...this.reducing);
    const error = low.data.map((value, i) => value - reduced.data[i]);
    const correction = { ...low, data: error.slice() };
    for (let round = 1; round < rounds; round++) {
      const back = resample(correction, ...this.thereAndBack);
      correction.data.forEach((value, i) => (correction.data[i] = value + error[i] - back.data[i]));
    }
    const added = this.enlarge(correction);
    return { ...high, data: high.data.map((value, i) => value + added.data[i]) };
  }
}

// -- one stage ---------------------------------------------------------------------------------------------------------

// Number of pixels on each side of a patch that the second differences depend on.
const MARGIN = 2;
// Stencils of the derivatives x, y, xx and yy. Each entry is a shift down, a shift to the right, and a weight.
const DERIVATIVES = [
  [[0, 1, 1], [0, -1, -1]],
  [[1, 0, 1], [-1, 0, -1]],
  [[0, 2, 1], [0, 0, -2], [0, -2, 1]],
  [[2, 0, 1], [0, 0, -2], [-2, 0, 1]],
];

// Each hidden unit of a stage has eight orientations: the four flips of a filter and of its transpose. Filters are
// split into parts that are even or odd along rows and columns. The four flips share the products of these parts, which
// takes a quarter of the time.
class Stage {
  constructor(described) {
    Object.assign(this, described);
    const [layers, rank, across, patch] = described.left.shape;
    const along = described.right.shape[2];
    const left = decode(described.left);
    const right = decode(described.right);
    const base = across * along;
    this.window = patch + 2 * MARGIN;
    this.units = 2 * base; // filters and their transposes
    const weights = Array.from({ length: layers }, (_, layer) => {
      const full = Array.from({ length: base }, () => new Float64Array(patch * patch));
      for (let r = 0; r < rank; r++) {
        for (let unit = 0; unit < base; unit++) {
          const k = Math.floor(unit / along);
          const l = unit % along;
          for (let i = 0; i < patch; i++) {
            const factor = left[((layer * rank + r) * across + k) * patch + i];
            for (let j = 0; j < patch; j++) {
              full[unit][i * patch + j] += factor * right[((layer * rank + r) * along + l) * patch + j];
            }
          }
        }
      }
      return full;
    });
    this.up = evenAndOdd(withTransposes(this.windowFilters(weights.slice(1), base), this.window), this.window, true);
    this.down = evenAndOdd(withTransposes(weights[0], patch), patch, false);
    const bias = decode(described.bias);
    this.bias = Float64Array.from({ length: this.units }, (_, unit) => bias[unit % base]);
    this.visibleBias = decode(described.visible_bias)[0];
  }

  // Converts weights of derivatives to filters on the pixels of a window.
  windowFilters(layers, base) {
    const { patch, window } = this;
    return span(0, base).map((unit) => {
      const filter = new Float64Array(window * window);
      DERIVATIVES.forEach((stencil, which) => {
        for (const [down, across, weight] of stencil) {
          for (let i = 0; i < patch; i++) {
            for (let j = 0; j < patch; j++) {
              filter[(i + MARGIN + down) * window + j + MARGIN + across] += weight * layers[which][unit][i * patch + j];
            }
          }
        }
      });
      return filter;
    });
  }

  // Returns the number of patches along an axis with `length` pixels.
  count(length) {
    return Math.ceil(length / this.stride) + this.patch / this.stride - 1;
  }

  // Sums the predicted details for patch rows `first` to `last`. `missing` combines such bands into an image.
  band(image, first, last, progress) {
    const { patch, stride, window } = this;
    const rows = this.count(image.height);
    const columns = this.count(image.width);
    const padded = this.padded(image);
    const scales = this.scales(padded, rows, columns);
    const total = { ...emptyImage((last - first - 1) * stride + patch, (columns - 1) * stride + patch), first };
    const quarter = Math.ceil(window / 2) ** 2;
    const parts = new Float64Array(4 * quarter * TOGETHER);
    const fields = new Float64Array(4 * this.units * TOGETHER);
    for (let row = first; row < last; row++) {
      for (let column = 0; column < columns; column += TOGETHER) {
        const some = Math.min(TOGETHER, columns - column);
        const number = row * columns + column;
        gather(padded, parts, row * stride, column * stride, this, scales, number, some);
        multiply(this.up, parts, fields, this.units, quarter);
        this.hidden(fields);
        this.addPatches(total, fields, row - first, column, some, scales, number);
      }
      progress(1);
    }
    return total;
  }

  // Returns the details that are missing from an image, averaged over all patches at each pixel.
  missing({ height, width }, bands) {
    const offset = this.patch - this.stride;
    const share = (this.stride / this.patch) ** 2;
    const result = emptyImage(height, width);
    for (const band of bands) {
      for (let row = 0; row < band.height; row++) {
        const i = row + band.first * this.stride - offset;
        if (i < 0 || i >= height) continue;
        for (let j = 0; j < width; j++) {
          result.data[i * width + j] += share * band.data[row * band.width + j + offset];
        }
      }
    }
    return result;
  }

  // Pads an image for the outermost patches by repeating its edges.
  padded(image) {
    const beyond = this.patch - this.stride + MARGIN;
    const [height, width] = [image.height, image.width].map((n) => Math.ceil(n / this.stride) * this.stride + 2 * beyond);
    const result = emptyImage(height, width);
    const inside = (place, length) => Math.min(Math.max(place - beyond, 0), length - 1);
    for (let i = 0; i < height; i++) {
      const from = inside(i, image.height) * image.width;
      for (let j = 0; j < width; j++) result.data[i * width + j] = image.data[from + inside(j, image.width)];
    }
    return result;
  }

  // Returns the scale of each patch: the root mean square of its derivatives, plus a constant.
  scales({ data, width, height }, rows, columns) {
    const { patch, stride } = this;
    // A summed-area table gives the sum of squares over each patch as four terms.
    const across = width - 2 * MARGIN + 1;
    const sums = new Float64Array((height - 2 * MARGIN + 1) * across);
    for (let i = MARGIN; i < height - MARGIN; i++) {
      let line = 0;
      for (let j = MARGIN; j < width - MARGIN; j++) {
        const at = i * width + j;
        const x = data[at + 1] - data[at - 1];
        const y = data[at + width] - data[at - width];
        const xx = data[at + 2] - 2 * data[at] + data[at - 2];
        const yy = data[at + 2 * width] - 2 * data[at] + data[at - 2 * width];
        line += x * x + y * y + xx * xx + yy * yy;
        const place = (i - MARGIN + 1) * across + j - MARGIN + 1;
        sums[place] = sums[place - across] + line;
      }
    }
    return Float64Array.from({ length: rows * columns }, (_, which) => {
      const top = Math.floor(which / columns) * stride;
      const left = (which % columns) * stride;
      const corner = (i, j) => sums[(top + i) * across + left + j];
      const mean = (corner(patch, patch) - corner(0, patch) - corner(patch, 0) + corner(0, 0)) / (4 * patch * patch);
      return Math.sqrt(Math.max(mean, 1e-8)) + this.floor;
    });
  }

  // Replaces, in place, products of even and odd parts with even and odd combinations of the hidden means of the four
  // flips. One half is subtracted from each mean.
  hidden(fields) {
    const length = this.units * TOGETHER;
    for (let n = 0; n < length; n++) {
      const bias = this.bias[Math.floor(n / TOGETHER)];
      const [ee, eo, oe, oo] = [fields[n], fields[n + length], fields[n + 2 * length], fields[n + 3 * length]];
      const [plain, left, top, turned] = [
        logistic(bias + ee + eo + oe + oo), logistic(bias + ee - eo + oe - oo),
        logistic(bias + ee + eo - oe - oo), logistic(bias + ee - eo - oe + oo),
      ];
      fields[n] = plain + left + top + turned;
      fields[n + length] = plain - left + top - turned;
      fields[n + 2 * length] = plain + left - top - turned;
      fields[n + 3 * length] = plain - left - top + turned;
    }
  }

  // Adds the predicted details of some patches to the sum over all patches.
  addPatches(total, hidden, row, column, some, scales, first) {
    const { patch, stride, units } = this;
    const half = Math.ceil(patch / 2);
    const found = new Float64Array(4 * half * half * TOGETHER);
    for (let part = 0; part < 4; part++) {
      for (let entry = 0; entry < half * half; entry++) {
        const weights = (part * half * half + entry) * units;
        let [a, b, c, d] = [0, 0, 0, 0];
        for (let unit = 0; unit < units; unit++) {
          const weight = this.down[weights + unit];
          const at = (part * units + unit) * TOGETHER;
          a += weight * hidden[at];
          b += weight * hidden[at + 1];
          c += weight * hidden[at + 2];
          d += weight * hidden[at + 3];
        }
        found.set([a, b, c, d], (part * half * half + entry) * TOGETHER);
      }
    }
    const part = half * half * TOGETHER;
    for (let which = 0; which < some; which++) {
      const scale = scales[first + which];
      for (let i = 0; i < patch; i++) {
        const [near, down] = i < half ? [i, 1] : [patch - 1 - i, -1];
        const line = (row * stride + i) * total.width + (column + which) * stride;
        for (let j = 0; j < patch; j++) {
          const [left, across] = j < half ? [j, 1] : [patch - 1 - j, -1];
          const at = (near * half + left) * TOGETHER + which;
          const even = found[at] + across * found[at + part];
          const odd = found[at + 2 * part] + across * found[at + 3 * part];
          total.data[line + j] += scale * (even + down * odd + this.visibleBias);
        }
      }
    }
  }
}

// Number of patches to compute at once, so that each weight is loaded once for all of them.
const TOGETHER = 4;
const logistic = (t) => 1 / (1 + Math.exp(-t)) - 0.5;

function withTransposes(filters, side) {
  const transposed = filters.map((filter) => filter.map((_, n) => filter[(n % side) * side + Math.floor(n / side)]));
  return [...filters, ...transposed];
}

// Splits filters into parts that are even or odd along rows and columns. A quarter of each part is enough. For windows,
// the result is (part, filter, entry), to be multiplied by sums and differences of mirrored pixels. These count the
// middle row and column twice. For patches, the result is (part, entry, filter).
function evenAndOdd(filters, side, ofWindows) {
  const half = Math.ceil(side / 2);
  const result = new Float64Array(4 * filters.length * half * half);
  filters.forEach((filter, unit) => {
    for (let part = 0; part < 4; part++) {
      const down = part < 2 ? 1 : -1;
      const across = part % 2 ? -1 : 1;
      for (let i = 0; i < half; i++) {
        for (let j = 0; j < half; j++) {
          const bottom = side - 1 - i;
          const right = side - 1 - j;
          let value = filter[i * side + j] + across * filter[i * side + right];
          value = (value + down * (filter[bottom * side + j] + across * filter[bottom * side + right])) / 4;
          if (ofWindows && i === bottom) value /= 2;
          if (ofWindows && j === right) value /= 2;
          const entry = i * half + j;
          const at = ofWindows ? unit * half * half + entry : entry * filters.length + unit;
          result[part * filters.length * half * half + at] = value;
        }
      }
    }
  });
  return result;
}

// Computes sums and differences of mirrored pixels in neighboring windows, divided by their scales. The result has
// shape (part, entry, patch).
function gather({ data, width }, parts, top, left, { window, stride }, scales, first, some) {
  const half = Math.ceil(window / 2);
  const length = half * half * TOGETHER;
  for (let which = 0; which < some; which++) {
    const corner = top * width + left + which * stride;
    // Filters are invariant to a constant offset. Subtracting an offset reduces rounding errors.
    const middle = data[corner + (window >> 1) * (width + 1)];
    const share = 1 / scales[first + which];
    for (let i = 0; i < half; i++) {
      const upper = corner + i * width;
      const lower = corner + (window - 1 - i) * width;
      for (let j = 0; j < half; j++) {
        const right = window - 1 - j;
        const a = data[upper + j] - middle;
        const b = data[upper + right] - middle;
        const c = data[lower + j] - middle;
        const d = data[lower + right] - middle;
        const at = (i * half + j) * TOGETHER + which;
        parts[at] = share * (a + b + c + d);
        parts[at + length] = share * (a - b + c - d);
        parts[at + 2 * length] = share * (a + b - c - d);
        parts[at + 3 * length] = share * (a - b - c + d);
      }
    }
  }
}

// Multiplies filters of shape (part, unit, entry) by window parts of shape (part, entry, patch). The resulting fields
// have shape (part, unit, patch).
function multiply(filters, parts, fields, units, quarter) {
  for (let part = 0; part < 4; part++) {
    for (let unit = 0; unit < units; unit++) {
      const weights = (part * units + unit) * quarter;
      let [a, b, c, d] = [0, 0, 0, 0];
      for (let entry = 0; entry < quarter; entry++) {
        const weight = filters[weights + entry];
        const at = (part * quarter + entry) * TOGETHER;
        a += weight * parts[at];
        b += weight * parts[at + 1];
        c += weight * parts[at + 2];
        d += weight * parts[at + 3];
      }
      const at = (part * units + unit) * TOGETHER;
      fields[at] = a;
      fields[at + 1] = b;
      fields[at + 2] = c;
      fields[at + 3] = d;
    }
  }
}

// -- photographs -------------------------------------------------------------------------------------------------------

// Weights of R, G and B in the luminance, and the increase of each channel per unit of luminance, as in
// mvrbm.vision.color.
const LUMINANCE = [65.481 / 255, 128.553 / 255, 24.966 / 255];
const LUMINANCE_GAIN = 255 / (65.481 + 128.553 + 24.966);
const luminanceOf = (r, g, b) => LUMINANCE[0] * r + LUMINANCE[1] * g + LUMINANCE[2] * b + 16 / 255;

class Enlarger {
  constructor({ scale, rounds, stages }) {
    Object.assign(this, { scale, rounds, stages: stages.map((each) => new Stage(each)) });
  }

  // Enlarges luminance. `bandsOf` computes the bands of a stage, given its number, in this worker or in helpers.
  async luminance(low, resampler, bandsOf = this.oneBand) {
    let image = resampler.enlarge(low);
    for (const [number, stage] of this.stages.entries()) {
      const missing = stage.missing(image, await bandsOf.call(this, number, image));
      const better = { ...image, data: image.data.map((value, i) => value + missing.data[i]) };
      image = this.rounds ? resampler.backProject(low, better, this.rounds) : better;
    }
    return image;
  }

  oneBand(number, image) {
    const stage = this.stages[number];
    return [stage.band(image, 0, stage.count(image.height), () => {})];
  }

  // Enlarges an image with RGBA bytes on a white background. The stages enlarge the luminance, and bicubic
  // interpolation enlarges the colors. Returns the result and, for comparison, the bicubic image. Both are opaque.
  async picture({ width, height, data }, bandsOf) {
    const resampler = new Resampler(height, width, this.scale);
    const channels = [0, 1, 2].map((channel) => ({
      height, width,
      data: Float64Array.from({ length: width * height }, (_, i) => {
        const alpha = data[4 * i + 3] / 255;
        return 1 - alpha * (1 - data[4 * i + channel] / 255);
      }),
    }));
    const gray = channels[0].data.every((value, i) => value === channels[1].data[i] && value === channels[2].data[i]);
    const of = gray ? (r) => r : luminanceOf;
    const [r, g, b] = channels.map((channel) => channel.data);
    const low = { height, width, data: r.map((value, i) => of(value, g[i], b[i])) };
    const high = await this.luminance(low, resampler, bandsOf);
    const colors = channels.map((channel) => resampler.enlarge(channel).data);
    const gain = gray ? 1 : LUMINANCE_GAIN;
    const better = new Uint8ClampedArray(4 * high.data.length).fill(255);
    const bicubic = new Uint8ClampedArray(4 * high.data.length).fill(255);
    for (let i = 0; i < high.data.length; i++) {
      const own = of(colors[0][i], colors[1][i], colors[2][i]);
      colors.forEach((color, channel) => {
        bicubic[4 * i + channel] = 255 * color[i];
        better[4 * i + channel] = 255 * (color[i] + gain * (high.data[i] - own));
      });
    }
    return { width: high.width, height: high.height, better, bicubic };
  }
}
