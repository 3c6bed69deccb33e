// Boltzmann machine with an image layer, an optional label layer and one hidden layer. This file does not access the
// page.
//
// All states are Float64Arrays. In double precision, rounding errors are negligible for data of any scale.
"use strict";

const size = (shape) => shape.reduce((product, length) => product * length, 1);

// One step of a coupling: an einsum equation for an array and a factor, such as "rkJ,rlJ->kl". Returns the shape of the
// result, and functions for both directions. The adjoint swaps the input and the output of the equation.
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

// Compiles an equation to two loops: one over the entries of the output, and one over the terms of each sum. The offset
// of a term in the array, or in the factor, is the sum of an entry offset and a term offset.
function product(input, own, output, sizes, factor) {
  const summed = [...new Set(input + own)].filter((letter) => !output.includes(letter)).join("");
  const arrayOut = offsets(output, input, sizes);
  const arraySum = offsets(summed, input, sizes);
  const factorOut = offsets(output, own, sizes);
  const factorSum = offsets(summed, own, sizes);
  return (array) => {
    const result = new Float64Array(arrayOut.length);
    for (let entry = 0; entry < result.length; entry++) {
      const a = arrayOut[entry];
      const b = factorOut[entry];
      let total = 0;
      for (let term = 0; term < arraySum.length; term++) {
        total += array[a + arraySum[term]] * factor[b + factorSum[term]];
      }
      result[entry] = total;
    }
    return result;
  };
}

// Returns, for all values of the indices `letters` in row-major order, the offset in an array with the indices `axes`.
function offsets(letters, axes, sizes) {
  const stride = {};
  let step = 1;
  for (const letter of [...axes].reverse()) {
    stride[letter] = step;
    step *= sizes[letter];
  }
  return [...letters].reduce((before, letter) => {
    const after = new Int32Array(before.length * sizes[letter]);
    for (let entry = 0; entry < after.length; entry++) {
      const index = entry % sizes[letter];
      after[entry] = before[(entry - index) / sizes[letter]] + index * (stride[letter] ?? 0);
    }
    return after;
  }, new Int32Array(1));
}

// A coupling as a sequence of steps.
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

// -- units -------------------------------------------------------------------------------------------------------------

// The temperature divides the energy. `beta`, the inverse temperature, therefore multiplies the bias and the field of
// discrete units, and divides the variance of Gaussian units.

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
      // No index is found if the probabilities sum to less than 1 because of rounding.
      return oneHot(chosen < 0 ? mean.length - 1 : chosen, mean.length);
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
    const bias = decode(described.bias);
    const scale = described.scale && decode(described.scale);
    Object.assign(this, UNITS[described.kind](bias, scale), { bias });
    if (described.steps) Object.assign(this, coupling(described.steps, described.shape));
  }
}

class Machine {
  constructor(model) {
    this.visible = new Layer(model.visible);
    this.hidden = new Layer(model.hidden);
    this.label = model.label && new Layer(model.label);
    // Hidden fields of all labels, for computing exact label probabilities.
    this.columns = this.label
      ? Array.from({ length: this.label.size }, (_, i) => this.label.toHidden(oneHot(i, this.label.size)))
      : [];
  }

  // Returns the hidden field of an image and a label, where the label is one-hot or consists of probabilities.
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

  // Returns F(x, label), or F(x) without a label.
  freeEnergy(x, label = null) {
    if (this.label && !label) {
      const logits = this.labelLogits(x);
      const largest = Math.max(...logits);
      return -largest - Math.log(sum(logits.map((logit) => Math.exp(logit - largest))));
    }
    const own = this.visible.energy(x) + (label ? this.label.energy(label) : 0);
    return own - this.hidden.logNormalizer(this.hiddenField(x, label));
  }

  // Returns -F(x, label) for each label.
  labelLogits(x) {
    const field = this.hiddenField(x);
    const own = this.visible.energy(x);
    return Float64Array.from(this.columns, (column, number) => {
      const normalizer = this.hidden.logNormalizer(field.map((f, i) => f + column[i]));
      return normalizer + this.label.bias[number] - own;
    });
  }

  // Returns the exact label probabilities given an image.
  labelProbabilities(x) {
    return softmax(this.labelLogits(x));
  }

  // Returns the weights between one hidden unit and all pixels.
  filter(unit) {
    return this.visible.toVisible(oneHot(unit, this.hidden.size));
  }

  // Updates a state {x, mean, label, hidden} in place by one step up and down. Pixels where known[i] is true keep their
  // values. The label is fixed to heldLabel, unless heldLabel is -1. The step is a Gibbs step if `sampled` is true, and
  // a mean-field iteration otherwise.
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

  // Returns an initial state: a given image, or independent draws of all pixels.
  start(x = null, label = null) {
    const zero = new Float64Array(this.visible.size);
    const drawn = x ?? this.visible.sample(this.visible.mean(zero));
    const labels = this.label && (label ?? this.label.sample(this.label.mean(new Float64Array(this.label.size))));
    const state = { x: Float64Array.from(drawn), mean: Float64Array.from(drawn), label: labels, hidden: null };
    state.hidden = this.hiddenMean(state.x, state.label);
    return state;
  }
}
