#!/usr/bin/env bash
# Library: llama-index-embeddings-voyageai 0.7.0, voyageai 0.3.7
# Guess: `VoyageEmbedding` of a contextualized model embeds each text by itself, or knows which chunks are of one document.
# Happens: with `voyage-context-3`, `VoyageEmbedding` sends the texts of a batch, up to 1000 of any documents, as the chunks
#   of one document. A text's embedding then depends on the texts that share its batch, and differs from the embedding that a
#   query of equal text gets.
# Minded: runtime/hdruntime/serve/interfaces/contextualized.py, and docs/serve_api.md says it
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llama-index-embeddings-voyageai==0.7.0 \
    llama-index-core==0.14.25 voyageai==0.3.7
"$folder/venv/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import voyageai
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.embeddings.voyageai import VoyageEmbedding

requests = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        requests.append((self.path, body["inputs"]))
        data = [
            {"index": index, "data": [{"index": place, "embedding": [0.0]} for place in range(len(chunks))]}
            for index, chunks in enumerate(body["inputs"])
        ]
        answer = json.dumps({"data": data, "usage": {"total_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
embedding = VoyageEmbedding(model_name="voyage-context-3", voyage_api_key="none")
embedding._client = voyageai.Client(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}/v1")
# It would download a tokenizer to count tokens.
embedding._client.tokenize = lambda texts, model: [text.split() for text in texts]
documents = [Document(text="Berlin has 3.8 million people."), Document(text="Cats sleep most of the day.")]
IngestionPipeline(transformations=[embedding]).run(documents=documents)
embedding.get_query_embedding("Cats sleep most of the day.")
for path, inputs in requests:
    print(path, inputs)
assert requests == [
    ("/v1/contextualizedembeddings", [["Berlin has 3.8 million people.", "Cats sleep most of the day."]]),
    ("/v1/contextualizedembeddings", [["Cats sleep most of the day."]]),
], "each document is sent by itself"
PYTHON
