"""`hdexport serve` under load: many clients with texts of mixed lengths, beside one call of a session.

Usage: python -m benchmarks.cpu.serve BUNDLE [--clients 64] [--seconds 60] [--longest 4096] [--peer MODEL]

The server is the installed command, in a process of its own with its defaults; the clients are another process. Texts
have 1 to `--longest` tokens on a logarithmic scale. An answer is 200 or 429; of others there must be none. The session
then embeds the texts that were answered, with the same backend and threads, and the ratio of the two rates is printed;
memory is the server's, in the middle and at the end.

With `--peer`, the same clients ask sentence-transformers in a server of 20 lines, as many write it: a call of `encode`
for each request, in a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

import hdruntime
from benchmarks.texts import HELP
from hdexport.support.memory import resident_bytes_of

_PEER = """
import sys
import torch, uvicorn
from sentence_transformers import SentenceTransformer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

model = SentenceTransformer(sys.argv[1], device="cpu")
model.max_seq_length = int(sys.argv[3])

async def embed(request):
    text = (await request.json())["input"]
    vectors = await run_in_threadpool(model.encode, [text])
    tokens = len(model.tokenizer(text, truncation=True, max_length=model.max_seq_length)["input_ids"])
    data = [{"object": "embedding", "index": 0, "embedding": vectors[0].tolist()}]
    return JSONResponse({"data": data, "usage": {"total_tokens": tokens}})

async def health(request):
    return JSONResponse({})

routes = [Route("/v1/embeddings", embed, methods=["POST"]), Route("/health", health)]
uvicorn.run(Starlette(routes=routes), port=int(sys.argv[2]), log_level="warning")
"""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--peer", metavar="MODEL", type=Path)
    options = parser.parse_args()
    serve = [Path(sys.executable).with_name("hdexport"), "serve", options.bundle, "--backend", "onnxruntime", "--port"]
    found = _served(lambda port: [*serve, port], options, "hdexport serve")
    with hdruntime.load(options.bundle, "onnxruntime") as session:
        session.embed(found["texts"][:4], overflow="truncate")
        began = time.perf_counter()
        session.embed(found["texts"], overflow="truncate")
        alone = found["tokens"] / (time.perf_counter() - began)
    print(f"one session.embed: {alone:.0f} tokens/s, ratio {found['tokens'] / found['seconds'] / alone:.2f}")
    if options.peer is not None:
        peer = [sys.executable, "-c", _PEER, options.peer]
        _served(lambda port: [*peer, port, options.longest], options, "sentence-transformers")


def _served(command: Callable[[int], list[Any]], options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Start a server, load it, print its figures."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*map(str, command(port))], stderr=subprocess.DEVNULL) as server:
        try:
            found = asyncio.run(_load(f"http://127.0.0.1:{port}", options, server.pid))
        finally:
            server.send_signal(signal.SIGTERM)
    waits, tokens = np.sort(found["waits"]), found["tokens"]
    print(f"{name}, {options.clients} clients, {found['seconds']:.0f} s: {dict(found['statuses'])}")
    print(f"{tokens / found['seconds']:.0f} tokens/s, {len(waits) / found['seconds']:.1f} requests/s")
    print(f"an answer: median {waits[len(waits) // 2]:.2f} s, 95 % {waits[int(0.95 * len(waits))]:.2f} s")
    print(f"memory: {found['middle'] / 1e6:.0f} MB in the middle, {found['end'] / 1e6:.0f} MB at the end", flush=True)
    return found


async def _load(url: str, options: argparse.Namespace, pid: int) -> dict[str, Any]:
    words = HELP.split()
    statuses: Counter[int] = Counter()
    texts: list[str] = []
    waits: list[float] = []
    tokens = 0
    limits = httpx2.Limits(max_connections=options.clients)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        while True:
            try:
                await client.get("/health")
                break
            except httpx2.TransportError:
                await asyncio.sleep(0.1)
        ends = time.monotonic() + options.seconds

        async def ask(number: int) -> None:
            nonlocal tokens
            draw = np.random.default_rng(number)
            while time.monotonic() < ends:
                # A word of this text has 1.9 tokens.
                length = int(np.exp(draw.uniform(0, np.log(options.longest))) / 2) + 1
                start = int(draw.integers(0, len(words) - length))
                text = " ".join(words[start : start + length])
                body = {"input": text, "truncate": "end", "encoding_format": "base64"}
                began = time.monotonic()
                answer = await client.post("/v1/embeddings", content=json.dumps(body))
                statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    waits.append(time.monotonic() - began)
                    texts.append(text)
                    tokens += answer.json()["usage"]["total_tokens"]
                else:
                    await asyncio.sleep(0.2)

        began = time.monotonic()
        asking = [asyncio.create_task(ask(number)) for number in range(options.clients)]
        await asyncio.sleep(options.seconds / 2)
        middle = resident_bytes_of([pid])
        await asyncio.gather(*asking)
        seconds = time.monotonic() - began
    found = {"statuses": statuses, "texts": texts, "waits": waits, "tokens": tokens, "seconds": seconds}
    return found | {"middle": middle, "end": resident_bytes_of([pid])}


if __name__ == "__main__":
    main()
