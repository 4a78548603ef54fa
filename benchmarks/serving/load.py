"""Clients of a server: a closed loop, which shows its best rate, and an open loop, which shows how long texts wait."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.reliability.server import Answer, Connection, connected
from benchmarks.serving.models import Request

_CLIENT = "192.0.2.1"
_WARM_SHARE = 0.25
"""Seconds of a closed loop that are not counted, for each that is."""

_PATIENCE_SECONDS = 20.0
"""How long a loop waits for the last answers; a request of an open loop without one by then counts as failed."""


class Found(NamedTuple):
    """What clients saw.

    Attributes:
        requests: number of answers with status 200.
        tokens: of their texts.
        seconds: in which they came.
        waits: seconds of each, ascending.
        failed: status -> number of other answers; 0 for none.
    """

    requests: int
    tokens: int
    seconds: float
    waits: np.ndarray
    failed: dict[int, int]

    def wait_ms(self, quantile: float) -> float:
        """Milliseconds within which a share of the requests was answered; infinity where too many failed."""
        total = self.requests + sum(self.failed.values())
        place = int(quantile * (total - 1))
        return 1e3 * float(self.waits[place]) if place < len(self.waits) else float("inf")


def run(work: Coroutine[Any, Any, Found]) -> Found:
    """Run clients, which take little of the machine's time."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def closed_loop(port: int, requests: Iterator[Request], *, clients: int, seconds: float) -> Found:
    """Clients that send the next request when the one before is answered."""
    waits: list[float] = []
    failed: Counter[int] = Counter()
    tokens = 0
    begins = time.monotonic() + _WARM_SHARE * seconds
    ends = begins + seconds

    async def ask() -> None:
        nonlocal tokens
        async with connected(port, _CLIENT) as connection:
            while time.monotonic() < ends:
                request = next(requests)
                answer = await connection.post(request.body)
                if not begins <= time.monotonic() < ends:
                    continue
                if answer.status == 200:
                    waits.append(answer.seconds)
                    tokens += request.tokens
                else:
                    failed[answer.status] += 1
                    await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(ask()) for _ in range(clients)]
    # What still runs then is not counted, but a server that goes on computing would be slow in the next measurement.
    await asyncio.wait(tasks, timeout=ends + _PATIENCE_SECONDS - time.monotonic())
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return Found(len(waits), tokens, seconds, np.sort(waits), dict(failed))


async def open_loop(port: int, requests: Iterator[Request], *, rate: float, seconds: float, seed: int) -> Found:
    """Requests that come at a rate (Poisson), whether or not those before are answered."""
    waits: list[float] = []
    failed: Counter[int] = Counter()
    idle: list[Connection] = []
    draw, tokens = np.random.default_rng(seed), 0

    async def ask(request: Request, due: float) -> None:
        nonlocal tokens
        if idle:
            await sent(idle.pop(), request, due)
        else:
            async with connected(port, _CLIENT) as connection:
                await sent(connection, request, due)
                await is_over.wait()

    async def sent(connection: Connection, request: Request, due: float) -> None:
        nonlocal tokens
        answer: Answer = await connection.post(request.body)
        if answer.status == 200:
            waits.append(time.monotonic() - due)
            tokens += request.tokens
        else:
            failed[answer.status] += 1
        idle.append(connection)

    is_over, tasks = asyncio.Event(), []
    began = due = time.monotonic()
    while (due := due + draw.exponential(1 / rate)) < began + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(next(requests), due)))
    patience = time.monotonic() + _PATIENCE_SECONDS
    while len(waits) + failed.total() < len(tasks) and time.monotonic() < patience:
        await asyncio.sleep(0.05)
    failed[0] = len(tasks) - len(waits) - failed.total()
    is_over.set()
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Found(len(waits), tokens, seconds, np.sort(waits), dict(+failed))
