"""Latency of a text where a process may use half a core, one core of two, or both.

Usage, as root: python -m benchmarks.cpu.cpu_limits [--tokens 128] [--backend onnxruntime] [--rounds 5] [--output FILE]

A process puts itself in a control group with a quota, or binds itself to its first CPU, and loads the sample model:
"default" with the runtime's number of threads, "one-thread" with ``threads=1``, "own" with ONNX Runtime's own number,
which it binds to cores, and "spinning" with threads that keep their cores busy under a quota of 1.5 CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.cpu.models import BUNDLE, build_bundle
from benchmarks.cpu.targets import Figure, Ids, Target, figures_of, random_ids, run_cases
from hdruntime.process_limits import usable_cpus

_VOCAB_SIZE = 1000
_PERIOD_US = 100_000
_LEAST_SECONDS = 3.0

_QUOTAS = {"half": 0.5, "one-and-a-half": 1.5}
_CASES = (
    "half default", "half one-thread", "one-of-two default", "one-of-two one-thread", "two-of-two default",
    "two-of-two own", "one-and-a-half default", "one-and-a-half spinning", "one-and-a-half one-thread",
)  # fmt: skip
_TARGETS = (
    Target("half default", "half one-thread", Figure.LATENCY, 1.1),
    Target("one-of-two default", "one-of-two one-thread", Figure.LATENCY, 1.1),
    Target("two-of-two default", "two-of-two own", Figure.LATENCY, 1.05),
    Target("one-and-a-half default", "one-and-a-half spinning", Figure.LATENCY, 1.05),
    Target("one-and-a-half default", "one-and-a-half one-thread", Figure.LATENCY, 1.05),
)


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=128, help="of the text")
    parser.add_argument("--backend", choices=("onnxruntime", "openvino"), default="onnxruntime")
    return run_cases("benchmarks.cpu.cpu_limits", parser, _case_figures, _comparison)


@contextlib.contextmanager
def quota(cpus: float, mount: Path = Path("/sys/fs/cgroup")) -> Iterator[None]:
    """While this holds, the process is in a control group of its own with a quota.

    Args:
        cpus: the quota.
        mount: of the control groups.
    """
    if (mount / "cgroup.controllers").exists():
        home = mount
        files = {"cpu.max": f"{int(cpus * _PERIOD_US)} {_PERIOD_US}"}
    else:
        home = mount / "cpu"
        files = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(int(cpus * _PERIOD_US))}
    group = home / f"hdexport-cpu-limits-{os.getpid()}"
    try:
        group.mkdir()
        for name, text in files.items():
            (group / name).write_text(text)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        sys.exit(
            f"No control group with a quota can be made in {home}: {error}.\nRun it as root, outside of a container."
        )
    try:
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    place, way = options.case.split()
    with contextlib.ExitStack() as exits:
        if place in _QUOTAS:
            exits.enter_context(quota(_QUOTAS[place]))
        elif place == "one-of-two":
            os.sched_setaffinity(0, {min(usable_cpus())})
        # Loaded here, where the limits hold.
        import hdruntime
        from hdruntime.backends.onnxruntime import sessions as onnxruntime_sessions

        if way == "own":
            exits.enter_context(mock.patch.object(onnxruntime_sessions, "chosen_threads", return_value=(0, "")))
        elif way == "spinning":
            exits.enter_context(mock.patch.object(onnxruntime_sessions, "cpu_quota", return_value=None))
        threads = 1 if way == "one-thread" else None
        session = exits.enter_context(hdruntime.load(options.models / BUNDLE, options.backend, threads=threads))

        def run(ids: Ids) -> Any:
            return session(input_ids=ids)["last_hidden_state"]

        return figures_of(run, random_ids(options.tokens, _VOCAB_SIZE), least_seconds=_LEAST_SECONDS)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from hdexport.checkpoint import default_model

    source, _ = default_model()
    build_bundle(
        options.models,
        source=source,
        max_len=max(options.tokens, 512),
        targets=("openvino",) if options.backend == "openvino" else (),
    )
    # The other two are ways of ONNX Runtime.
    cases = [
        case for case in _CASES if options.backend == "onnxruntime" or case.split()[1] in ("default", "one-thread")
    ]
    first = cases[0]
    same = dict.fromkeys(cases[1:], (first, 0.001))
    return {"cases": cases, "targets": _TARGETS, "same_answers": same, "tokens": options.tokens}


if __name__ == "__main__":
    sys.exit(main())
