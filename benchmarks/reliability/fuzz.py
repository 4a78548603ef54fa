"""Fuzzed requests of a server: each has an answer that says what is wrong with it, and the next one is answered.

Usage: python -m benchmarks.reliability.fuzz [--requests 3000] [--seed 0] [--output FILE]

A request is a valid one of a route with something changed: a value of another type, a key too many, bytes that are no
JSON, an empty body, an odd text. The server is `hdexport serve` in a process of its own, on the loopback address. No
answer may be 5xx, and each error has a message. A valid request after every hundred must have its own embedding.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.record import show
from benchmarks.reliability.sample import sample_bundle

_VALID: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a text", "another"], "model": "any", "encoding_format": "float", "dimensions": 8},
    "/embed": {"inputs": ["a text"], "truncate": True, "normalize": True},
    "/": {"inputs": "a text"},
    "/tokenize": {"inputs": "a text", "add_special_tokens": True},
    "/decode": {"ids": [101, 2000, 102]},
}

_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1e300, 2**63, 0.5, "", " ", "a", "\0", "ä\u200b\U0001f600", "x" * 5000),
    *([], [[]], ["a", 1], [[1, 2], "a"], {}, {"a": {"b": []}}, [[10**9]], [None], ["a"] * 300),
]

_BODIES = [
    *(b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"input": "\\ud800"}'),
    *(b"[" * 200, b"1e999", b'{"input":1}{'),
]


def main() -> int:
    """Ask, count statuses, and compare the valid answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rng, statuses, wrong = random.Random(options.seed), Counter(), []
    with sample_bundle() as bundle, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "hdexport", "serve", str(bundle), "--port", str(port), "--max-texts", "256"]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                _wait(client)
                expected = _embedding(client)
                for number in range(options.requests):
                    answer, said = _ask(client, rng)
                    statuses[f"status_{answer.status_code}"] += 1
                    if answer.status_code >= 500 or (answer.status_code >= 400 and "message" not in answer.text):
                        wrong.append(f"{said}: {answer.status_code} {answer.text[:200]}")
                    if number % 100 == 99 and not np.allclose(_embedding(client), expected, atol=1e-6):
                        wrong.append(f"another embedding after request {number}")
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
    figures = {"requests": options.requests, "exit_code": code, "wrong": wrong[:10], **statuses}
    show(options.output, module="benchmarks.reliability.fuzz", **figures)
    return 1 if wrong or code not in (0, -signal.SIGTERM) else 0


def _wait(client: httpx2.Client) -> None:
    for _ in range(600):
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def _embedding(client: httpx2.Client) -> list[float]:
    answer = client.post("/v1/embeddings", json={"input": "A text to compare with.", "model": "any"})
    embedding: list[float] = answer.raise_for_status().json()["data"][0]["embedding"]
    return embedding


def _ask(client: httpx2.Client, rng: random.Random) -> tuple[httpx2.Response, str]:
    """The answer to a changed request, and what was asked."""
    path = rng.choice(sorted(_VALID))
    content = rng.choice(_BODIES)
    if rng.random() < 0.9:
        body = json.loads(json.dumps(_VALID[path]))
        for _ in range(rng.choice([1, 1, 2, 3])):
            body[rng.choice([*sorted(body), "another_key", "truncate", "prompt_name"])] = rng.choice(_VALUES)
        content = json.dumps(body).encode()
        if rng.random() < 0.2:
            changed = bytearray(content)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            content = bytes(changed)
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    return answer, f"POST {path} {content[:200]!r}"


if __name__ == "__main__":
    sys.exit(main())
