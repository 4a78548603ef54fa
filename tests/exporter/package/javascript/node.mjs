// Reads a request as JSON from standard input, and writes the answers to standard output.
import { readFileSync } from 'fs';
import * as transformers from '@huggingface/transformers';
import * as onnxruntime from 'onnxruntime-node';
import { answers } from './transformers.mjs';
import { embeddings } from './onnxruntime.mjs';

const request = JSON.parse(readFileSync(0));
const found =
  request.file === undefined
    ? await answers(transformers, './', { ...request, device: 'cpu' })
    : await embeddings(onnxruntime, readFileSync(request.file), 'cpu', request.inputs);
console.log(JSON.stringify(found));
