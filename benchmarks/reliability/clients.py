"""A short text of one client beside each kind of bad client: how long it waits, and what one client alone gets.

Usage: python -m benchmarks.reliability.clients [--bundle BUNDLE] [--seconds 6] [--cases WORD...] [--output FILE]

A client sends a text of a few words, again and again with short pauses: alone, then while another client, in a process
of its own, sends 400 long texts in one request, keeps 64 connections busy with short texts, keeps 16 busy with texts
of all lengths, or sends 2048 texts in each request. `alone` is measured before each case, and the ratio is of the two.
`throughput` is what one client with 32 connections and texts of all lengths gets from the server, in characters; with
`--threads 1` those of a second of CPU time depend little on what else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import show
from benchmarks.reliability.sample import sample_bundle, texts
from benchmarks.reliability.server import Connection, body_of, connected, served

_GOOD, _BAD = "192.0.2.1", "198.51.100.1"
_SHORT = "what is read, and by whom"
_PAUSE_SECONDS = 0.02

LOADS = ("400 long texts", "64 connections", "mixed lengths", "2048 texts")


def main() -> int:
    """Measure the cases, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bundle", type=Path, help="default: one of the sample model")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement (default: 6)")
    parser.add_argument("--threads", type=int, default=2, help="of the server's session (default: 2)")
    parser.add_argument("--cases", nargs="+", default=[*LOADS, "throughput"], metavar="CASE")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as exits:
        bundle = options.bundle or exits.enter_context(sample_bundle())
        server = exits.enter_context(served(bundle, "--threads", str(options.threads)))
        port = server.port
        figures: dict[str, Any] = {}
        asyncio.run(_waits(port, 1.0))
        for case in options.cases:
            if case == "throughput":
                before = server.cpu_seconds()
                characters = asyncio.run(_rate(port, options.seconds))
                used = server.cpu_seconds() - before
                figures[case] = {
                    "characters_per_second": round(characters / options.seconds),
                    "characters_per_cpu_second": round(characters / used),
                }
                continue
            alone = asyncio.run(_waits(port, options.seconds / 2))
            with _load(case, port):
                # The first answers are of a server that does not know the load yet.
                time.sleep(1.0)
                beside = asyncio.run(_waits(port, options.seconds))
            ratio = round(beside["p99_ms"] / alone["p99_ms"], 2)
            figures[case] = {"alone": alone, "beside": beside, "ratio_of_p99": ratio}
    show(options.output, module="benchmarks.reliability.clients", **figures)
    return 0


async def _waits(port: int, seconds: float) -> dict[str, float]:
    """The milliseconds that a short text waits."""
    found, ends = [], time.monotonic() + seconds
    async with connected(port, _GOOD) as connection:
        while time.monotonic() < ends:
            answer = await connection.post(body_of([_SHORT]))
            assert answer.status == 200, answer
            found.append(1e3 * answer.seconds)
            await asyncio.sleep(_PAUSE_SECONDS)
    values = np.quantile(found, [0.5, 0.99, 1.0])
    named = dict(zip(("median_ms", "p99_ms", "longest_ms"), (round(float(each), 1) for each in values), strict=True))
    return {"texts": len(found), **named}


@contextlib.contextmanager
def _load(case: str, port: int) -> Iterator[None]:
    """The bad client, in a process of its own, which is ended."""
    process = multiprocessing.get_context("spawn").Process(target=_run_load, args=(case, port), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _run_load(case: str, port: int) -> None:
    asyncio.run(_bad_client(case, port))


async def _bad_client(case: str, port: int) -> None:
    if case == "400 long texts":
        bodies = [[body_of(texts(400, shortest=200, longest=250))]]
    elif case == "64 connections":
        bodies = [[body_of([text])] for text in texts(64, shortest=3, longest=8)]
    elif case == "mixed lengths":
        bodies = [[body_of([text]) for text in itertools.islice(_mixed(seed), 20)] for seed in range(16)]
    else:
        bodies = [[body_of(texts(2048, shortest=2, longest=20))]]
    await asyncio.gather(*(_again_and_again(port, each) for each in bodies))


async def _again_and_again(port: int, bodies: Sequence[bytes]) -> None:
    async with connected(port, _BAD) as connection:
        while True:
            for body in bodies:
                if (await connection.post(body)).status != 200:
                    await asyncio.sleep(0.1)


async def _rate(port: int, seconds: float) -> int:
    """Characters that one client gets embedded."""
    done, began = [0], time.monotonic()

    async def ask(connection: Connection, seed: int) -> None:
        for text in _mixed(seed):
            if time.monotonic() - began >= seconds:
                return
            if (await connection.post(body_of([text]))).status == 200:
                done[0] += len(text)

    async with contextlib.AsyncExitStack() as exits:
        connections = [await exits.enter_async_context(connected(port, _BAD)) for _ in range(32)]
        await asyncio.gather(*(ask(each, seed) for seed, each in enumerate(connections)))
    return done[0]


def _mixed(seed: int) -> Iterator[str]:
    """Texts of 1 to 500 words, on a logarithmic scale, without end."""
    draw = random.Random(seed)
    while True:
        size = int(500 ** draw.random())
        yield from texts(1, shortest=size, longest=size)


if __name__ == "__main__":
    sys.exit(main())
