"""`hdexport serve` beside infinity and a sentence-transformers server of 20 lines: rates, waits and memory.

Usage: python -m benchmarks.serving [--infinity VENV] [--models tiny sample] [--seconds 7] [--clients 64]
    [--folder FOLDER] [--output FILE]

Each server is a process of its own with its defaults; `--infinity` names the environment in which it is installed:

    python -m venv VENV && VENV/bin/pip install 'infinity-emb[server,torch,optimum]==0.0.78'

All run one checkpoint, all-MiniLM-L6-v2 with 4096 positions ("sample") or its first layer alone ("tiny"), and must give
the same vectors; hdexport in bfloat16, where the processor has it, similar ones. First 64 clients send one text a
request, again and again: the rate. Then requests come at 0.7 of the best rate of infinity's engines (without it, of
sentence-transformers), the same rate for all servers: the waits. While one server is measured, the others are stopped.
Texts of up to 4096 tokens get three times the seconds, and the sample model alone; infinity's ONNX engine does not get
them, since the attention scores of its batch of 32 take 25 GB. With the default seconds and a `--folder` that has the
models, a run takes about 13 minutes.

The exit status is 1 if a target is missed: with the sample model and both mixes of short texts, at least twice the
requests per second of infinity's best engine, a 99th percentile of the waits of at most its median, and at most 0.4 of
its peak memory. The clients share the cores; on a busy machine the numbers mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.targets import TARGET_MISSED
from benchmarks.record import append, command_line, now
from benchmarks.serving.load import Found, closed_loop, open_loop, run
from benchmarks.serving.models import MIXES, MODELS, make_model, requests_of
from benchmarks.serving.servers import (
    INFINITY,
    OURS,
    OURS_IN_BFLOAT16,
    SENTENCE_TRANSFORMERS,
    Server,
    largest_difference,
    started,
)
from hdexport.bench.measure.calls import environment
from hdruntime.backends.openvino.devices import chosen_device, new_core

_SHARE_OF_RATE = 0.7
_LONG, _LONG_TIMES = "1 to 4096 tokens", 3
_TOLERANCES = {OURS_IN_BFLOAT16: 0.01}
_TOLERANCE = 1e-4
"""Largest difference of a number of vectors of length 1, by server, and of all others."""

_COMPARED = ("What is read, and by whom?", "a", "long documents " * 200)
_PACKAGES = ("hdexport", "onnxruntime", "openvino", "sentence-transformers", "torch", "uvicorn", "uvloop")
_OF_INFINITY = ("infinity_emb", "onnxruntime", "optimum", "sentence-transformers", "torch", "transformers", "uvicorn")

Row = dict[str, Any]


def main() -> int:
    """Measure, print a table, and compare with the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--infinity", type=Path, metavar="VENV")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="those whose names have one of these words")
    parser.add_argument("--seconds", type=float, default=7.0, help="of a measurement (default: 7)")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where models stay for the next run")
    parser.add_argument("--output", type=Path, help="append the result to this file, as a JSON line")
    options = parser.parse_args()
    ours = [OURS, *([OURS_IN_BFLOAT16] if chosen_device(new_core(), None).has_bfloat16 else [])]
    names = [*ours, *(INFINITY if options.infinity else ()), SENTENCE_TRANSFORMERS]
    names = [name for name in names if not options.servers or any(word in name for word in options.servers)]
    with contextlib.ExitStack() as exits:
        folder = options.folder or Path(exits.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        rows = [row for model in options.models for row in _of_model(model, names, folder, options)]
    machine = environment()
    print(
        f"{command_line('benchmarks.serving')}: {machine['cpu']}, cores: {machine['cores']}, {now()}",
        *_table(rows),
        sep="\n",
    )
    missed = _missed(rows)
    print(*missed, sep="\n")
    append(
        options.output,
        {
            "benchmark": "serving",
            "date": now(),
            "command": command_line("benchmarks.serving"),
            "cpu": machine["cpu"],
            "cores": machine["cores"],
            "commit": machine.get("commit"),
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "versions_of_infinity": _versions(options.infinity) if options.infinity else None,
            "rows": rows,
            "missed": missed,
        },
    )
    return TARGET_MISSED if missed else 0


def _of_model(model: str, names: Sequence[str], folder: Path, options: argparse.Namespace) -> list[Row]:
    """A row for each mix and server."""
    needs_onnx = any(INFINITY.get(name) == "optimum" for name in names)
    made = make_model(folder, model, options.infinity / "bin" / "optimum-cli" if needs_onnx else None)
    rows: list[Row] = []
    with contextlib.ExitStack() as exits:
        servers = [
            exits.enter_context(started(name, made, options.infinity, folder / f"{number}.log"))
            for number, name in enumerate(names)
        ]
        differences = largest_difference(servers, _COMPARED)
        print(f"{model}: largest difference of a number from {servers[0].name}: {differences}", file=sys.stderr)
        if any(difference > _TOLERANCES.get(name, _TOLERANCE) for name, difference in differences.items()):
            raise RuntimeError(f"The servers do not give the same vectors: {differences}")
        for server in servers:
            server.pause()
        for mix in options.mixes:
            if mix == _LONG and model != "sample":
                continue
            seconds = options.seconds * (_LONG_TIMES if mix == _LONG else 1)
            measured = [server for server in servers if mix != _LONG or INFINITY.get(server.name) != "optimum"]
            closed = {server.name: _closed(server, mix, made.bundle, seconds, options.clients) for server in measured}
            rate = _SHARE_OF_RATE * _rate_of_peers(closed)
            for server in measured:
                row = {"model": model, "mix": mix, "server": server.name} | closed[server.name]
                rows.append(row | _open(server, mix, made.bundle, seconds, rate))
                print(rows[-1], file=sys.stderr)
    return rows


def _rate_of_peers(closed: Mapping[str, Row]) -> float:
    """The best rate of infinity's engines; of the others where these answered nothing in time."""
    rates = {name: row["requests_per_second"] for name, row in closed.items()}
    rate = max((rates[name] for name in INFINITY if name in rates), default=0.0)
    rate = rate or rates.get(SENTENCE_TRANSFORMERS, 0.0) or rates.get(OURS, 0.0)
    if not rate:
        raise RuntimeError(f"No server answered a request in time: {closed}. Give more --seconds.")
    return float(rate)


def _closed(server: Server, mix: str, bundle: Path, seconds: float, clients: int) -> Row:
    server.resume()
    server.forget_peak()
    # Tokenized before, and the same ones for every server.
    requests = itertools.cycle(list(itertools.islice(requests_of(mix, bundle, seed=0), 4096)))
    began = server.cpu_seconds()
    found = run(closed_loop(server.port, requests, clients=clients, seconds=seconds))
    cpu_seconds = server.cpu_seconds() - began
    server.pause()
    # The CPU time of the warm-up, too: its requests are a share of all.
    share = seconds / (seconds + 0.25 * seconds)
    return {
        "requests_per_second": round(found.requests / found.seconds, 2),
        "tokens_per_second": round(found.tokens / found.seconds),
        "closed_p50_ms": _rounded(found, 0.5),
        "closed_p99_ms": _rounded(found, 0.99),
        "cpu_us_per_request": round(1e6 * share * cpu_seconds / max(1, found.requests)),
        "closed_failed": found.failed,
    }


def _open(server: Server, mix: str, bundle: Path, seconds: float, rate: float) -> Row:
    server.resume()
    requests = itertools.cycle(list(itertools.islice(requests_of(mix, bundle, seed=1), 4096)))
    found = run(open_loop(server.port, requests, rate=rate, seconds=seconds, seed=2))
    server.pause()
    return {
        "open_rate": round(rate, 2),
        "open_requests": found.requests,
        "open_p50_ms": _rounded(found, 0.5),
        "open_p99_ms": _rounded(found, 0.99),
        "open_failed": found.failed,
        "peak_mb": round(server.peak_bytes() / 1e6),
    }


def _rounded(found: Found, quantile: float) -> float | None:
    """Milliseconds; None where too many requests failed."""
    wait = found.wait_ms(quantile)
    return None if wait == float("inf") else round(wait, 1)


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| model, texts | server | requests/s | CPU per request | at rate | p50, p99 | failed | peak memory |"]
    lines.append("|---" * 8 + "|")
    for row in rows:
        waits = ", ".join("-" if row[key] is None else f"{row[key]:,.0f} ms" for key in ("open_p50_ms", "open_p99_ms"))
        failed = sum(row["open_failed"].values()) + sum(row["closed_failed"].values())
        figures = [
            f"{row['requests_per_second']:,.1f}",
            f"{row['cpu_us_per_request']:,} µs",
            f"{row['open_rate']:,.1f}",
        ]
        cells = [f"{row['model']}, {row['mix']}", row["server"], *figures, waits, f"{failed}", f"{row['peak_mb']:,} MB"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _missed(rows: Sequence[Row]) -> list[str]:
    """The targets that are missed."""
    missed = []
    for mix in (mix for mix in MIXES if mix != _LONG):
        of_mix: Mapping[str, Row] = {
            row["server"]: row for row in rows if (row["model"], row["mix"]) == ("sample", mix)
        }
        peers = [of_mix[name] for name in INFINITY if name in of_mix]
        if not peers or OURS not in of_mix:
            continue
        ours, best = of_mix[OURS], max(peers, key=lambda row: row["requests_per_second"])
        ratios = {
            "rate of infinity's best / ours": (best["requests_per_second"], ours["requests_per_second"], 1 / 2),
            "our p99 / its p50": (ours["open_p99_ms"], best["open_p50_ms"], 1.0),
            "our peak memory / its": (ours["peak_mb"], best["peak_mb"], 0.4),
        }
        for what, (value, against, at_most) in ratios.items():
            ratio = float("inf") if value is None else 0.0 if against is None else value / max(against, 1e-9)
            if ratio > at_most:
                missed.append(f"MISSED {mix}, {what}: {ratio:.2f}, at most {at_most:.2f}")
    return missed


def _versions(infinity: Path) -> dict[str, str]:
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {_OF_INFINITY!r}}}))"
    found = subprocess.run([infinity / "bin" / "python", "-c", code], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


if __name__ == "__main__":
    sys.exit(main())
