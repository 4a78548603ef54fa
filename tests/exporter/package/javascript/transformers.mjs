// What Transformers.js answers, in Node and in a browser.

const ASK = {
  'feature-extraction': (pipe, text) =>
    pipe(text, { pooling: 'mean', normalize: true }).then((output) => Array.from(output.data)),
  'text-classification': (pipe, text) => pipe(text, { top_k: null }),
  'token-classification': (pipe, text) => pipe(text, { ignore_labels: [] }),
  'fill-mask': (pipe, text) => pipe(text, { top_k: 50 }),
  'question-answering': (pipe, [question, context]) => pipe(question, context),
};

export async function answers({ env, pipeline }, root, { task, dtype, device, inputs }) {
  env.allowRemoteModels = false;
  env.allowLocalModels = true;
  env.useBrowserCache = false;
  env.localModelPath = root;
  const pipe = await pipeline(task, 'package', { dtype, device });
  const found = [];
  for (const input of inputs) {
    found.push(await ASK[task](pipe, input));
  }
  await pipe.dispose();
  return found;
}
