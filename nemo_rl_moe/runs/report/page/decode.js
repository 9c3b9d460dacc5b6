// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// The page's data: one JSON document, and numeric arrays packed by runs/report/arrays.py.

const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const blobs = new Map();

function textOfBlock(name) {
  return document.getElementById(name).textContent;
}

async function inflatedBlock(name) {
  const packed = Uint8Array.from(atob(textOfBlock(name)), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function loadBlobs() {
  const names = Array.from(document.querySelectorAll('script[type="application/gzip"]'), (block) => block.id);
  for (const name of names.filter((name) => name !== "plotly")) {
    blobs.set(name, await inflatedBlock(name));
  }
}

// All numbers of an array, in row-major order.
function numbers({ blob, dtype, shape, offset }) {
  const Kind = KINDS[dtype];
  const length = shape.reduce((product, size) => product * size, 1);
  return new Kind(blobs.get(blob).buffer.slice(offset, offset + length * Kind.BYTES_PER_ELEMENT));
}

// Runs plotly. The policy of this page has the script's hash. A script with another hash would not run.
async function runPlotly() {
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(await inflatedBlock("plotly"));
  document.head.append(script);
}
