"""`hdexport serve` under load: many clients with texts of mixed lengths, beside one call of a session.

Usage: python -m benchmarks.cpu.serve BUNDLE [--clients 64] [--seconds 60] [--longest 4096]

The server is the installed command, in a process of its own with its defaults; the clients are another process. Texts
have 1 to `--longest` tokens on a logarithmic scale. An answer is 200 or 429; of others there must be none. The session
then embeds the texts that were answered, with the same backend and threads, and the ratio of the two rates is printed;
memory is the server's, in the middle and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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

import hdruntime
from benchmarks.texts import HELP


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--longest", type=int, default=4096)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = ["serve", options.bundle, "--port", port, "--backend", "onnxruntime"]
    command = [Path(sys.executable).with_name("hdexport"), *serve]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL) as server:
        try:
            found = asyncio.run(_load(f"http://127.0.0.1:{port}", options, server.pid))
        finally:
            server.send_signal(signal.SIGTERM)
    with hdruntime.load(options.bundle, "onnxruntime") as session:
        session.embed(found["texts"][:4], overflow="truncate")
        began = time.perf_counter()
        session.embed(found["texts"], overflow="truncate")
        alone = time.perf_counter() - began
    waits = np.sort(found["waits"])
    tokens = found["tokens"]
    print(f"{options.clients} clients, {found['seconds']:.0f} s: {dict(found['statuses'])}")
    rate, alone_rate = tokens / found["seconds"], tokens / alone
    print(f"{rate:.0f} tokens/s, {alone_rate:.0f} in one session.embed, ratio {rate / alone_rate:.2f}")
    print(f"an answer: median {waits[len(waits) // 2]:.2f} s, 95 % {waits[int(0.95 * len(waits))]:.2f} s")
    print(f"memory: {found['middle'] / 1e6:.0f} MB in the middle, {found['end'] / 1e6:.0f} MB at the end")


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
        middle = _resident(pid)
        await asyncio.gather(*asking)
        seconds = time.monotonic() - began
    found = {"statuses": statuses, "texts": texts, "waits": waits, "tokens": tokens, "seconds": seconds}
    return found | {"middle": middle, "end": _resident(pid)}


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
