#!/usr/bin/env bash
# Library: uvicorn 0.54.0, starlette 1.10.0
# Guess: `--root-path /prefix` is for a proxy that forwards /prefix/x: the application gets the path /x.
# Happens: uvicorn puts the prefix before every path, as it assumes that the proxy has removed it. A proxy that forwards
#   /prefix/x makes /prefix/prefix/x of it, which is no route: 404. A proxy that forwards /x gets the answer.
# Minded: runtime/hdruntime/serve/asgi.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uvicorn==0.54.0 starlette==1.10.0
"$folder/venv/bin/python" - <<'PYTHON'
import threading
import time
import urllib.error
import urllib.request
from importlib.metadata import version

import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

seen = []


async def answer(request):
    return PlainTextResponse("here")


async def application(scope, receive, send):
    if scope["type"] == "http":
        seen.append(scope["path"])
    await routes(scope, receive, send)


routes = Starlette(routes=[Route("/x", answer)])
server = uvicorn.Server(uvicorn.Config(application, port=0, root_path="/prefix", log_level="critical"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.05)
port, found = server.servers[0].sockets[0].getsockname()[1], {}
for path in ("/x", "/prefix/x"):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
            found[path] = response.status, seen[-1]
    except urllib.error.HTTPError as error:
        found[path] = error.code, seen[-1]
server.should_exit = True
print("uvicorn", version("uvicorn"), "starlette", version("starlette"), "status and the application's path:", found)
assert found == {"/x": (200, "/prefix/x"), "/prefix/x": (404, "/prefix/prefix/x")}
PYTHON
