// A Boltzmann machine: one visible picture, an optional label, one hidden layer. Nothing here touches the page.
//
// All states are Float64Arrays. With weights that are stored in single precision, the passes then have no rounding
// errors that anyone could see, whatever the units of the data are.
"use strict";

const size = (shape) => shape.reduce((product, length) => product * length, 1);

// One step of a coupling: an equation such as "rkJ,rlJ->kl" of the array and a factor, whose shape gives all sizes but
// those of letters that only the array has. Returns functions of the array, in both directions: the adjoint of a sum
// of products exchanges the input and the output.
function contraction(step, inputShape) {
  const [input, own, output] = step.equation.split(/,|->/);
  const factor = decode(step.factor);
  const sizes = {};
  [...own].forEach((letter, axis) => (sizes[letter] = step.factor.shape[axis]));
  [...input].forEach((letter, axis) => (sizes[letter] = inputShape[axis]));
  return {
    shape: [...output].map((letter) => sizes[letter]),
    forward: product(input, own, output, sizes, factor),
    backward: product(output, own, input, sizes, factor),
  };
}

// Compiles an equation to two loops, over the entries of the output and over those of the sum. The tables hold where
// each entry lies in the array and in the factor; they are small, because only their sums address all products.
function product(input, own, output, sizes, factor) {
  const summed = [...new Set(input + own)].filter((letter) => !output.includes(letter)).join("");
  const [arrayOut, arraySum] = [offsets(output, input, sizes), offsets(summed, input, sizes)];
  const [factorOut, factorSum] = [offsets(output, own, sizes), offsets(summed, own, sizes)];
  return (array) => {
    const result = new Float64Array(arrayOut.length);
    for (let entry = 0; entry < result.length; entry++) {
      const [a, b] = [arrayOut[entry], factorOut[entry]];
      let total = 0;
      for (let term = 0; term < arraySum.length; term++) {
        total += array[a + arraySum[term]] * factor[b + factorSum[term]];
      }
      result[entry] = total;
    }
    return result;
  };
}

// For every value of the indices `letters`, in row-major order: the offset in an array with the indices `axes`.
function offsets(letters, axes, sizes) {
  const stride = {};
  [...axes].reduceRight((step, letter) => ((stride[letter] = step), step * sizes[letter]), 1);
  return [...letters].reduce((before, letter) => {
    const after = new Int32Array(before.length * sizes[letter]);
    for (let entry = 0; entry < after.length; entry++) {
      const index = entry % sizes[letter];
      after[entry] = before[(entry - index) / sizes[letter]] + index * (stride[letter] ?? 0);
    }
    return after;
  }, new Int32Array(1));
}

// The steps of a coupling one after another.
function coupling(steps, shape) {
  const compiled = [];
  for (const step of steps) {
    compiled.push(contraction(step, compiled.length ? compiled.at(-1).shape : shape));
  }
  return {
    toHidden: (x) => compiled.reduce((state, step) => step.forward(state), x),
    toVisible: (y) => compiled.reduceRight((state, step) => step.backward(state), y),
  };
}

// -- units: mean, sample, own energy and log-normalizer in a field, at an inverse temperature `beta` ------------------
// A temperature divides the energy: it scales bias and field of discrete units, and the variance of Gaussian ones.

const softplus = (t) => (t > 0 ? t + Math.log1p(Math.exp(-t)) : Math.log1p(Math.exp(t)));
const sigmoid = (t) => 1 / (1 + Math.exp(-t));
const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
const sum = (array) => array.reduce((total, value) => total + value, 0);

const UNITS = {
  bernoulli: (bias) => ({
    statistic: (x) => x,
    energy: (x) => -sum(x.map((value, i) => value * bias[i])),
    logNormalizer: (field) => sum(field.map((f, i) => softplus(f + bias[i]))),
    mean: (field, beta = 1) => field.map((f, i) => sigmoid(beta * (f + bias[i]))),
    sample: (mean) => mean.map((p) => (Math.random() < p ? 1 : 0)),
  }),
  gaussian: (bias, scale) => ({
    statistic: (x) => x.map((value, i) => value / scale[i]),
    energy: (x) => sum(x.map((value, i) => 0.5 * ((value - bias[i]) / scale[i]) ** 2)),
    logNormalizer: (field) =>
      sum(field.map((f, i) => 0.5 * Math.log(2 * Math.PI) + Math.log(scale[i]) + f * (bias[i] / scale[i] + 0.5 * f))),
    mean: (field) => field.map((f, i) => bias[i] + scale[i] * f),
    sample: (mean, beta = 1) => mean.map((m, i) => m + (scale[i] / Math.sqrt(beta)) * normal()),
  }),
  categorical: (bias) => ({
    statistic: (x) => x,
    energy: (x) => -sum(x.map((value, i) => value * bias[i])),
    mean: (field, beta = 1) => softmax(field.map((f, i) => beta * (f + bias[i]))),
    sample: (mean) => {
      let left = Math.random();
      const chosen = mean.findIndex((p) => (left -= p) < 0);
      return oneHot(chosen < 0 ? mean.length - 1 : chosen, mean.length); // below 0: rounding of the last sum
    },
  }),
};

function softmax(logits) {
  const largest = Math.max(...logits);
  const weights = logits.map((logit) => Math.exp(logit - largest));
  const total = sum(weights);
  return weights.map((weight) => weight / total);
}

function oneHot(index, length) {
  const array = new Float64Array(length);
  array[index] = 1;
  return array;
}

class Layer {
  constructor(described) {
    this.shape = described.shape;
    this.size = size(described.shape);
    this.kind = described.kind;
    const [bias, scale] = [decode(described.bias), described.scale && decode(described.scale)];
    Object.assign(this, UNITS[described.kind](bias, scale), { bias });
    if (described.steps) Object.assign(this, coupling(described.steps, described.shape));
  }
}

class Machine {
  constructor(model) {
    this.visible = new Layer(model.visible);
    this.hidden = new Layer(model.hidden);
    this.label = model.label && new Layer(model.label);
    // Fields of all labels on the hidden layer: with them, the probabilities of labels are exact sums.
    this.columns = this.label
      ? Array.from({ length: this.label.size }, (_, i) => this.label.toHidden(oneHot(i, this.label.size)))
      : [];
  }

  // The field on the hidden layer of a picture, and of a label (or of the probabilities of labels).
  hiddenField(x, label = null) {
    const field = this.visible.toHidden(this.visible.statistic(x));
    this.columns.forEach((column, number) => {
      const share = label ? label[number] : 0;
      if (share) column.forEach((f, i) => (field[i] += share * f));
    });
    return field;
  }

  hiddenMean(x, label = null, beta = 1) {
    return this.hidden.mean(this.hiddenField(x, label), beta);
  }

  visibleMean(y, beta = 1) {
    return this.visible.mean(this.visible.toVisible(this.hidden.statistic(y)), beta);
  }

  labelMean(y, beta = 1) {
    return this.label.mean(this.label.toVisible(this.hidden.statistic(y)), beta);
  }

  // F(x) of a picture alone, or F(x, label).
  freeEnergy(x, label = null) {
    if (this.label && !label) {
      const logits = this.labelLogits(x);
      const largest = Math.max(...logits);
      return -largest - Math.log(sum(logits.map((logit) => Math.exp(logit - largest))));
    }
    const own = this.visible.energy(x) + (label ? this.label.energy(label) : 0);
    return own - this.hidden.logNormalizer(this.hiddenField(x, label));
  }

  // -F(x, label) of every label, and the exact probabilities of labels given a picture.
  labelLogits(x) {
    const [field, own] = [this.hiddenField(x), this.visible.energy(x)];
    return Float64Array.from(this.columns, (column, number) => {
      const normalizer = this.hidden.logNormalizer(field.map((f, i) => f + column[i]));
      return normalizer + this.label.bias[number] - own;
    });
  }

  labelProbabilities(x) {
    return softmax(this.labelLogits(x));
  }

  // The weights of one hidden unit to all pixels.
  filter(unit) {
    return this.visible.toVisible(oneHot(unit, this.hidden.size));
  }

  // One step up and down, in place. A state is {x, mean, label, hidden}; pixels where known[i] is true keep their
  // values, and so does a label that is held. `sampled` draws (Gibbs); otherwise means take the place of draws, which
  // is a step of the mean-field equations.
  step(state, { known, heldLabel = -1, beta = 1, sampled = true }) {
    const up = this.hiddenMean(state.x, state.label, beta);
    const y = sampled ? this.hidden.sample(up, beta) : up;
    const mean = this.visibleMean(y, beta);
    const next = sampled ? this.visible.sample(mean, beta) : mean;
    for (let i = 0; i < next.length; i++) {
      if (known[i]) mean[i] = state.x[i];
      else state.x[i] = next[i];
    }
    state.mean = mean;
    state.hidden = up;
    if (this.label) {
      const labels = heldLabel < 0 ? this.labelMean(y, beta) : null;
      state.label = labels ? (sampled ? this.label.sample(labels) : labels) : oneHot(heldLabel, this.label.size);
    }
  }

  // A state to start from: a given picture, or independent draws of all pixels.
  start(x = null, label = null) {
    const zero = new Float64Array(this.visible.size);
    const drawn = x ?? this.visible.sample(this.visible.mean(zero));
    const labels = this.label && (label ?? this.label.sample(this.label.mean(new Float64Array(this.label.size))));
    const state = { x: Float64Array.from(drawn), mean: Float64Array.from(drawn), label: labels, hidden: null };
    state.hidden = this.hiddenMean(state.x, state.label);
    return state;
  }
}
