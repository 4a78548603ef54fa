#!/usr/bin/env bash
# Library: haystack-ai 3.4.1, vllm-haystack 3.0.1
# Guess: an embedder whose server answers 400, as to a text of too many tokens, raises the client's error.
# Happens: `OpenAIDocumentEmbedder` and `VLLMDocumentEmbedder` log the error and return all documents of the batch with the
#   embedding None, the good ones too; a pipeline goes on to write them. `raise_on_failure=True` raises. Embedders of single
#   texts raise always.
# Minded: docs/generate_clients.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check haystack-ai==3.4.1 vllm-haystack==3.0.1
"$folder/venv/bin/python" - <<'PYTHON'
import logging
import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from importlib.metadata import version

import openai
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.vllm import VLLMDocumentEmbedder


def reply(body):
    return 400, {"error": {"message": "too many tokens", "type": "invalid_request_error", "code": 400}}


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

logging.disable()
print("haystack-ai", version("haystack-ai"), "vllm-haystack", version("vllm-haystack"))
options = {"model": "m", "api_key": Secret.from_token("none"), "api_base_url": url}
for kind in (OpenAIDocumentEmbedder, VLLMDocumentEmbedder):
    documents = kind(**options, progress_bar=False).run([Document(content="a"), Document(content="b")])["documents"]
    print(kind.__name__, [each.embedding for each in documents])
    assert [each.embedding for each in documents] == [None, None]
    try:
        kind(**options, progress_bar=False, raise_on_failure=True).run([Document(content="a")])
    except openai.BadRequestError as error:
        print("  with raise_on_failure:", error)
    else:
        raise AssertionError("no error")
try:
    OpenAITextEmbedder(**options).run("a")
except openai.BadRequestError as error:
    print("OpenAITextEmbedder:", error)
else:
    raise AssertionError("no error")
PYTHON
