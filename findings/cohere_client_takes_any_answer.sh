#!/usr/bin/env bash
# Library: cohere 7.3.1 (its Python client)
# Guess: answers are pydantic models, so a server whose answer has another shape gets a validation error from the client.
# Happens: the models are made without validation. Embeddings that are texts, and an answer without the required field
#   `embeddings`, arrive as objects of the right class, whose attributes have other types or are None; the error comes where
#   the program uses them. Whoever tests a server with this client must call `model_validate`, which rejects them all.
# Minded: tests/clients/ask_cohere.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check cohere==7.3.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import cohere
import pydantic

ANSWERS = [
    {"id": "a", "embeddings": {"float": [["no", "numbers"]]}},
    {"id": "a", "embeddings": {"ubinary": ["a text"]}},
    {"id": 5, "texts": 7},
]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        content = json.dumps(ANSWERS[0]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = cohere.ClientV2("key", base_url=f"http://127.0.0.1:{server.server_port}")
while ANSWERS:
    found = client.embed(model="any", texts=["a"], input_type="search_query")
    assert isinstance(found, cohere.EmbedByTypeResponse)
    try:
        type(found).model_validate(ANSWERS[0])
    except pydantic.ValidationError as error:
        print(json.dumps(ANSWERS.pop(0)), "->", found.id, found.embeddings, "| validated:", error.error_count(), "errors")
    else:
        raise SystemExit("the answer is valid")
PYTHON
