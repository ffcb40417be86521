// SPDX-License-Identifier: Apache-2.0
// Runs the models that ops_runtimes.py wrote, in onnxruntime-node or onnxruntime-web (WebAssembly).
//
//     node ops_runtimes.mjs FOLDER onnxruntime-web NODE_MODULES

import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";

const [folder, name, modules] = process.argv.slice(2);
const require = createRequire(path.join(path.resolve(modules), "/"));
const ort = require(name);
const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  float16: Uint16Array,
  int64: BigInt64Array,
};
const provider = name === "onnxruntime-web" ? "wasm" : "cpu";
if (provider === "wasm") {
  ort.env.wasm.numThreads = 1;
}

function tensor({ type, dims, file }) {
  const bytes = fs.readFileSync(path.join(folder, file));
  const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  return new ort.Tensor(type, new ARRAYS[type](buffer), dims);
}

async function run({ model, inputs, outputs }) {
  const options = { executionProviders: [provider], logSeverityLevel: 4 };
  const session = await ort.InferenceSession.create(path.join(folder, model), options);
  const feeds = Object.fromEntries(inputs.map((each) => [each.name, tensor(each)]));
  const answers = await session.run(feeds);
  await session.release();
  return outputs.map(({ name: output, file }) => {
    const { data, dims, type } = answers[output];
    fs.writeFileSync(path.join(folder, file), Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    return { type, dims };
  });
}

const found = [];
for (const job of JSON.parse(fs.readFileSync(path.join(folder, "jobs.json"), "utf8"))) {
  try {
    found.push({ answers: await run(job) });
  } catch (error) {
    found.push({ error: String(error.message ?? error) });
  }
}
const version = JSON.parse(fs.readFileSync(path.join(modules, name, "package.json"))).version;
fs.writeFileSync(path.join(folder, "found.json"), JSON.stringify({ version, found }));
