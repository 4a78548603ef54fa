"""`hdexport serve --sessions N`: requests per second and CPU time with several numbers of sessions, side by side.

Usage: python -m benchmarks.cpu.serve_sessions BUNDLE [--sessions 1 2] [--backend onnxruntime] [--clients 64]
       [--texts 1] [--shortest 4 --longest 20] [--seconds 10] [--rounds 5]

Each number of sessions has a server of its own, the installed command, which idles while another is measured. A round
measures each server once, in turn, so that a busy machine slows all of them. Clients are another process; a request has
`--texts` texts of `--shortest` to `--longest` words. The table has medians of the rounds, and the CPU time of the
server's process, which says more than the rate where other programs run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import numpy as np

from benchmarks.texts import HELP
from hdexport.support.memory import resident_bytes_of


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--shortest", type=int, default=4)
    parser.add_argument("--longest", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with contextlib.ExitStack() as exits:
        servers = {}
        for sessions in options.sessions:
            command = [
                Path(sys.executable).with_name("hdexport"),
                "serve",
                options.bundle,
                "--backend",
                options.backend,
            ]
            command += ["--backend", options.backend, "--sessions", sessions]
            process = exits.enter_context(subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True))
            exits.callback(process.terminate)
            assert process.stderr is not None
            servers[sessions] = process, process.stderr.readline().split(": ")[-1].strip()
        found: dict[int, list[tuple[float, float, float]]] = {sessions: [] for sessions in servers}
        # The first round warms up.
        for _ in range(options.rounds + 1):
            for sessions, (process, url) in servers.items():
                found[sessions].append(asyncio.run(_round(url, process.pid, options)))
        print(f"{options.clients} clients, {options.texts} texts of {options.shortest} to {options.longest} words")
        print("sessions | requests/s | CPU ms per request | p50 ms | memory")
        for sessions, (process, _) in servers.items():
            rates, cpu, waits = (statistics.median(column) for column in zip(*found[sessions][1:], strict=True))
            memory = resident_bytes_of([process.pid]) / 1e6
            print(f"{sessions} | {rates:.1f} | {1e3 * cpu:.2f} | {1e3 * waits:.0f} | {memory:.0f} MB", flush=True)


async def _round(url: str, pid: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Requests per second, CPU seconds of the server per request, and the median seconds of an answer."""
    words, waits = HELP.split(), list[float]()
    limits = httpx2.Limits(max_connections=options.clients)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        before, began = _cpu_seconds(pid), time.monotonic()

        async def ask(number: int) -> None:
            draw = np.random.default_rng(number)
            while time.monotonic() < began + options.seconds:
                lengths = draw.integers(options.shortest, options.longest + 1, options.texts)
                starts = draw.integers(0, len(words) - options.longest, options.texts)
                pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
                texts = [" ".join(words[start : start + length]) for start, length in pairs]
                asked = time.monotonic()
                answer = await client.post(
                    "/v1/embeddings", json={"input": texts, "truncate": "end", "encoding_format": "base64"}
                )
                answer.raise_for_status()
                waits.append(time.monotonic() - asked)

        await asyncio.gather(*(ask(number) for number in range(options.clients)))
        seconds = time.monotonic() - began
        return len(waits) / seconds, (_cpu_seconds(pid) - before) / len(waits), statistics.median(waits)


def _cpu_seconds(pid: int) -> float:
    """Time that a process has spent, in user mode and in the kernel's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
