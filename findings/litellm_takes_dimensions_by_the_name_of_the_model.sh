#!/usr/bin/env bash
# Library: litellm 1.110.2
# Guess: `embedding("openai/NAME", dimensions=64, api_base=...)` sends `dimensions` to the server at that address, which
#   answers for its models.
# Happens: it is sent only if the name has "text-embedding-3". Any other raises UnsupportedParamsError before a request, and
#   says that dimensions are "not supported for OpenAI `text-embedding-3` and later models". The provider hosted_vllm sends it
#   for every name; infinity sends `output_dimension`.
# Minded: docs/generate_clients.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check litellm==1.110.2
"$folder/venv/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Else the import asks GitHub for prices.
from importlib.metadata import version

import litellm


def reply(body):
    rows = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
    return 200, {"object": "list", "model": "m", "data": rows, "usage": {"prompt_tokens": 1, "total_tokens": 1}}


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

litellm.telemetry = False
print("litellm", version("litellm"))
found = {}
for model in ("openai/any", "openai/my-text-embedding-3", "hosted_vllm/any", "infinity/any"):
    asked.clear()
    try:
        litellm.embedding(model, input=["a"], dimensions=64, api_base=url, api_key="none")
    except litellm.UnsupportedParamsError as error:
        print(model, error)
    found[model] = [{key: value for key, value in body.items() if "dimension" in key} for body in asked]
    print(model, "sends", found[model])
sent = [{"dimensions": 64}]
assert list(found.values()) == [[], sent, sent, [{"output_dimension": 64}]]
PYTHON
