"""The benchmark of servers measures real ones; a missed target, an unanswered request and other vectors count."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serving import __main__ as serving
from benchmarks.serving.load import Found, closed_loop, open_loop, run
from benchmarks.serving.models import Request
from benchmarks.serving.servers import INFINITY, OURS, OURS_IN_BFLOAT16, SENTENCE_TRANSFORMERS, largest_difference

PYTORCH, ONNX = INFINITY


def row(server: str, **figures: float) -> dict[str, Any]:
    """A row of a mix of short texts that meets the targets, beside others with the same arguments."""
    met = {OURS: (200.0, 8.0, 30.0), PYTORCH: (70.0, 20.0, 1000.0), ONNX: (100.0, 10.0, 90.0)}[server]
    named = dict(zip(("requests_per_second", "open_p50_ms", "peak_mb"), met, strict=True))
    mix = {"model": "sample", "mix": "4 to 20 words", "server": server, "open_p99_ms": named["open_p50_ms"] + 1}
    return mix | named | figures


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, ()),
        ({"requests_per_second": 199.0}, ("rate of infinity's best / ours: 0.50",)),
        ({"open_p99_ms": 10.5}, ("our p99 / its p50: 1.05",)),
        ({"open_p99_ms": None}, ("our p99 / its p50: inf",)),
        ({"peak_mb": 40.0}, ("our peak memory / its: 0.44",)),
    ],
)
def test_targets_are_of_the_best_engine(figures: dict[str, Any], missed: tuple[str, ...]) -> None:
    found = serving._missed([row(OURS, **figures), row(PYTORCH), row(ONNX)])
    assert len(found) == len(missed)
    for line, expected in zip(found, missed, strict=True):
        assert f"MISSED 4 to 20 words, {expected}" in line


def test_requests_without_an_answer_count_as_the_longest_waits() -> None:
    found = Found(3, 0, 1.0, np.array([0.1, 0.2, 0.3]), {0: 1})
    assert [found.wait_ms(share) for share in (0.0, 0.5, 1.0)] == [100.0, 200.0, float("inf")]


def test_loops_count_what_is_answered_and_what_is_not() -> None:
    """A server that refuses each third request, and answers some of an open loop never."""
    asked = itertools.count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.readuntil(b"\r\n\r\n")) and head.startswith(b"POST"):
            await reader.readexactly(2)
            status = 429 if next(asked) % 3 == 0 else 200
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)

    async def measured() -> Found:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            requests = itertools.repeat(Request(b"{}", 7))
            closed = await closed_loop(port, requests, clients=2, seconds=0.3)
            assert closed.failed.keys() == {429}
            assert closed.tokens == 7 * closed.requests > 0
            return await open_loop(port, requests, rate=100.0, seconds=0.3, seed=0)

    found = run(measured())
    assert (found.requests > 0, found.failed.keys()) == (True, {429})
    assert abs(found.requests - 2 * found.failed[429]) <= 3


def test_other_vectors_are_found() -> None:
    class Server:
        def __init__(self, name: str, vector: list[float]) -> None:
            self.name, self._vector = name, np.array(vector)

        def vector(self, text: str) -> np.ndarray:
            return self._vector

    servers: Any = [Server("a", [1.0, 0.0]), Server("b", [1.0, 0.0]), Server("c", [0.9, 0.1])]
    assert largest_difference(servers, ["text"]) == {"b": 0.0, "c": pytest.approx(0.1)}


@pytest.mark.nightly
def test_servers_are_measured_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "row.jsonl"
    options = ["--models", "tiny", "--mixes", "4 to 20 words", "--seconds", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["serving", *options])
    assert serving.main() == 0
    rows = json.loads(output.read_text())["rows"]
    assert [each["server"] for each in rows] == [OURS, OURS_IN_BFLOAT16, SENTENCE_TRANSFORMERS]
    for each in rows:
        assert min(each[key] for key in ("requests_per_second", "cpu_us_per_request", "peak_mb")) > 0
        assert not each["closed_failed"]
