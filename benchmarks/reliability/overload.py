"""A server that is asked for more than it can hold: how much of its best rate goes into answers that come in time.

Usage: python -m benchmarks.reliability.overload [--bundle BUNDLE] [--seconds 10] [--timeout 6] [--output FILE]

Four clients keep the server busy first, with as many requests at a time as it answers at once, which gives its best
rate. Then requests of 8 texts come at random times, at 0.5, 1, 2 and 5 times this rate, each on a connection of its
own, of one of four clients. Printed for each: the rate of texts with an answer within the timeout, in parts of the best
rate; the part of the server's CPU time, as at the best rate, that went into these answers, which depends little on
other programs; requests by status; accepted requests without an answer in time; and the longest answer. `at_once` are
64 requests of 30 texts at the same moment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import show
from benchmarks.reliability.sample import sample_bundle, texts
from benchmarks.reliability.server import Answer, body_of, connected, served

_FACTORS = (0.5, 1.0, 2.0, 5.0)
_CLIENTS = [f"192.0.2.{number}" for number in range(1, 5)]
_TEXTS = 8
_BODIES = [body_of(texts(8 * number, shortest=10, longest=60)[-_TEXTS:]) for number in range(1, 33)]


def main() -> int:
    """Measure, print, and end with 1 where an accepted request was not answered."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bundle", type=Path, help="default: one of the sample model")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate (default: 10)")
    parser.add_argument("--timeout", type=float, default=6.0, help="of the server (default: 6)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as exits:
        bundle = options.bundle or exits.enter_context(sample_bundle())
        server = exits.enter_context(served(bundle, "--timeout", str(options.timeout), "--threads", "1"))
        port = server.port
        asyncio.run(_best(port, 2.0))
        used = server.cpu_seconds()
        best, answered = asyncio.run(_best(port, options.seconds))
        work = (server.cpu_seconds() - used) / answered
        figures: dict[str, Any] = {"timeout_s": options.timeout, "best_texts_per_second": round(best, 1)}
        for factor in _FACTORS:
            used = server.cpu_seconds()
            asked = asyncio.run(_asked(port, factor * best / _TEXTS, options.seconds))
            figures[str(factor)] = _told(asked, options, best, work / (server.cpu_seconds() - used))
        figures["at_once"] = _told(asyncio.run(_at_once(port)), options)
    show(options.output, module="benchmarks.reliability.overload", **figures)
    return int(any(each.get("accepted_without_answer") for each in figures.values() if isinstance(each, dict)))


def _told(
    answers: list[tuple[float, Answer]], options: argparse.Namespace, best: float = 0.0, per_text: float = 0.0
) -> dict[str, Any]:
    """Figures of answers and the times at which they came, from the first request on.

    Args:
        best: texts a second at the best rate; 0 where nothing is compared with it.
        per_text: the part of the CPU time since the first request that a text takes at the best rate.
    """
    statuses = Counter(answer.status for _, answer in answers)
    # The clients share the machine: a tenth of a second is theirs.
    good = [at for at, each in answers if each.status == 200 and each.seconds <= options.timeout + 0.1]
    figures: dict[str, Any] = {"statuses": {str(status): number for status, number in sorted(statuses.items())}}
    if best:
        in_time = sum(at <= options.seconds for at in good)
        figures["part_of_best_rate"] = round(_TEXTS * in_time / options.seconds / best, 3)
        figures["part_of_work"] = round(_TEXTS * len(good) * per_text, 3)
    figures["accepted_without_answer"] = sum(each.status not in (429, 413) for _, each in answers) - len(good)
    figures["longest_s"] = round(max(each.seconds for _, each in answers), 2)
    if refused := [each.retry_after for _, each in answers if each.status == 429]:
        figures["retry_after_s"] = [min(refused), max(refused)]
    return figures


async def _best(port: int, seconds: float) -> tuple[float, int]:
    """Texts a second of 16 connections that send one request after the other, and texts with an answer in all."""
    ends, in_time, answered = time.monotonic() + seconds, [0], [0]

    async def ask(number: int) -> None:
        async with connected(port, _CLIENTS[number % len(_CLIENTS)]) as connection:
            while time.monotonic() < ends:
                answer = await connection.post(random.Random(answered[0]).choice(_BODIES))
                answered[0] += _TEXTS * (answer.status == 200)
                in_time[0] += _TEXTS * (answer.status == 200 and time.monotonic() <= ends)

    await asyncio.gather(*map(ask, range(16)))
    return in_time[0] / seconds, answered[0]


async def _asked(port: int, rate: float, seconds: float) -> list[tuple[float, Answer]]:
    draw, began, asking = random.Random(0), time.monotonic(), []
    at = 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        asking.append(asyncio.create_task(_ask(port, draw.choice(_CLIENTS), draw.choice(_BODIES), began)))
    return list(await asyncio.gather(*asking))


async def _at_once(port: int) -> list[tuple[float, Answer]]:
    body, began = body_of(texts(30, shortest=10, longest=60)), time.monotonic()
    return list(await asyncio.gather(*(_ask(port, _CLIENTS[number % 4], body, began) for number in range(64))))


async def _ask(port: int, client: str, body: bytes, began: float) -> tuple[float, Answer]:
    async with connected(port, client) as connection:
        answer = await connection.post(body)
    return time.monotonic() - began, answer


if __name__ == "__main__":
    sys.exit(main())
