// Decodes an array on the page, {shape, type, data}, where data is in base64.
"use strict";

function decode(tensor) {
  const bytes = Uint8Array.from(atob(tensor.data), (letter) => letter.charCodeAt(0));
  if (tensor.type === "uint8") return Float64Array.from(bytes);
  if (tensor.type === "float16") return Float64Array.from(new Uint16Array(bytes.buffer), half);
  return Float64Array.from(new Float32Array(bytes.buffer));
}

// Converts a half-precision float, which has 1 sign bit, 5 exponent bits and 10 fraction bits.
function half(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const value = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : (fraction / 1024) * 2 ** -14;
  return bits >> 15 ? -value : value;
}
