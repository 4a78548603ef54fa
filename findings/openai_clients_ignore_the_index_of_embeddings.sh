#!/usr/bin/env bash
# Library: openai 3.57.0, langchain-openai 1.7.4, haystack-ai 3.4.1
# Guess: embeddings in an answer may come in any order: each has an `index`, by which clients find the text.
# Happens: all three take them in the order of the list. Where a server answers with `index` 2, 1, 0, each text gets another's
#   embedding, without a message. A server has to keep the order of the inputs.
# Minded: runtime/hdruntime/serve/interfaces/openai.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 langchain-openai==1.7.4 haystack-ai==3.4.1
"$folder/venv/bin/python" - <<'PYTHON'
import logging
import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from importlib.metadata import version

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.utils import Secret
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI


def reply(body):
    """The text's number as its embedding, the last text first."""
    rows = [{"object": "embedding", "index": place, "embedding": [float(text)]} for place, text in enumerate(body["input"])]
    return 200, {"object": "list", "model": "m", "data": rows[::-1], "usage": {"prompt_tokens": 3, "total_tokens": 3}}


asked = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append(body)
        status, answer = reply(body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"

texts = ["0", "1", "2"]
openai = OpenAI(base_url=url, api_key="none").embeddings.create(model="m", input=texts).data
langchain = OpenAIEmbeddings(model="m", api_key="none", base_url=url, check_embedding_ctx_length=False)
haystack = OpenAIDocumentEmbedder(model="m", api_key=Secret.from_token("none"), api_base_url=url, progress_bar=False)
found = {
    "openai": [each.embedding for each in openai],
    "langchain-openai": langchain.embed_documents(texts),
    "haystack-ai": [each.embedding for each in haystack.run([Document(content=text) for text in texts])["documents"]],
}
for name, embeddings in found.items():
    print(name, version(name), "embeddings of the texts 0, 1, 2:", embeddings)
assert [each.index for each in openai] == [2, 1, 0]
assert all(embeddings == [[2.0], [1.0], [0.0]] for embeddings in found.values())
PYTHON
