// Arrays of a page: {shape, type, data}, where data is base64.
"use strict";

function decode(tensor) {
  const bytes = Uint8Array.from(atob(tensor.data), (letter) => letter.charCodeAt(0));
  if (tensor.type === "uint8") return Float64Array.from(bytes);
  return Float64Array.from(tensor.type === "float16" ? new Uint16Array(bytes.buffer) : new Float32Array(bytes.buffer),
    tensor.type === "float16" ? half : undefined);
}

// A number of 16 bits: sign, 5 bits of exponent, 10 of fraction.
function half(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const value = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : (fraction / 1024) * 2 ** -14;
  return bits >> 15 ? -value : value;
}
