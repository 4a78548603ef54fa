"""Measure how one program embeds texts: loading, and texts of several lengths.

``python measure.py REQUEST`` runs in the environment of the program, without hdexport. REQUEST is a JSON file:

* ``embedder``: the file beside this one with the program's `load` and, for models that it converts first, `convert`;
* ``step``: ``convert`` or ``run``;
* ``model``: the folder that is loaded; ``checkpoint`` and ``variant`` as the program's functions take them;
* ``threads``, ``lengths``, ``vocab_size``: threads, tokens of each text, and ids of the vocabulary;
* ``output``: the JSON file that is written.

A text is random ids, the same for all programs. The first run is timed by itself; then the text runs until it has run
twice and for three seconds. A text whose first run takes more than a minute runs once, and its first run is the figure.
The growth of a text is the peak of resident memory in its runs beside what was resident before.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_MIN_RUNS, _MIN_SECONDS = 2, 3.0
_LONG_SECONDS = 60.0
_FIRST_ID = 1000
"""Ids below are special tokens of some models."""


def main(file: str) -> None:
    """Convert the checkpoint, or load the model and run it."""
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    began = time.perf_counter()
    embedder = importlib.import_module(request["embedder"])
    model = Path(request["model"])
    if request["step"] == "convert":
        embedder.convert(Path(request["checkpoint"]), model, request["variant"])
        found: dict[str, Any] = {}
    else:
        found = _measured(embedder, model, request, began=began)
    found["versions"] = {name: importlib.metadata.version(name) for name in embedder.PACKAGES}
    Path(request["output"]).write_text(json.dumps(found), encoding="utf-8")


def _measured(embedder: Any, model: Path, request: dict[str, Any], *, began: float) -> dict[str, Any]:
    lengths = request["lengths"]
    run = embedder.load(model, variant=request["variant"], threads=request["threads"], max_tokens=max(lengths))
    found: dict[str, Any] = {
        "load_s": time.perf_counter() - began, "run_s": {}, "cpu_s": {}, "growth_bytes": {}, "embeddings": {},
    }  # fmt: skip
    peak_bytes = _resident_bytes("VmHWM")
    for tokens in lengths:
        ids = np.random.default_rng(tokens).integers(_FIRST_ID, request["vocab_size"], (1, tokens))
        before = _resident_bytes("VmRSS")
        _forget_peak()
        seconds, cpu_seconds = [], []
        while _runs_again(seconds):
            began, cpu_began = time.perf_counter(), time.process_time()
            embedding = run(ids)
            seconds.append(time.perf_counter() - began)
            cpu_seconds.append(time.process_time() - cpu_began)
        found["run_s"][tokens] = {"first": seconds[0], "median": statistics.median(seconds[1:] or seconds)}
        found["cpu_s"][tokens] = statistics.median(cpu_seconds[1:] or cpu_seconds)
        found["growth_bytes"][tokens] = _resident_bytes("VmHWM") - before
        peak_bytes = max(peak_bytes, _resident_bytes("VmHWM"))
        found["embeddings"][tokens] = np.asarray(embedding, np.float64).tolist()
    return {**found, "peak_bytes": peak_bytes}


def _runs_again(seconds: list[float]) -> bool:
    if not seconds:
        return True
    return seconds[0] < _LONG_SECONDS and (len(seconds) <= _MIN_RUNS or sum(seconds[1:]) < _MIN_SECONDS)


def _resident_bytes(figure: str) -> int:
    """Resident memory of this process, ``VmRSS``, or its peak, ``VmHWM``, which in `resource` would be the parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{figure}:")[2].split()[0]) * 1024


def _forget_peak() -> None:
    """Let ``VmHWM`` begin again with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
