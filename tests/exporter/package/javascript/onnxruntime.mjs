// What onnxruntime-node and onnxruntime-web compute of a file that they load from bytes, for ids of tokens.

export async function embeddings({ InferenceSession, Tensor }, bytes, device, inputs) {
  const session = await InferenceSession.create(bytes, { executionProviders: [device] });
  const found = [];
  for (const ids of inputs) {
    const values = { input_ids: ids, attention_mask: ids.map(() => 1), token_type_ids: ids.map(() => 0) };
    const feeds = {};
    for (const name of session.inputNames) {
      feeds[name] = new Tensor('int64', BigInt64Array.from(values[name], BigInt), [1, ids.length]);
    }
    const outputs = await session.run(feeds);
    found.push(Array.from(outputs.sentence_embedding.data));
  }
  await session.release();
  return found;
}
