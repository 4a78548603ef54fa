"""Measure how one program embeds texts: loading, and texts of several lengths.

``python measure.py REQUEST`` runs in the environment of the program, without hdexport. REQUEST is a JSON file:

* ``embedder``: the file beside this one with the program's `load` and, for models that it converts first, `convert`;
* ``step``: ``convert`` or ``run``;
* ``model``: the folder that is loaded; ``checkpoint`` and ``variant`` as the program's functions take them;
* ``threads``, ``lengths``, ``vocab_size``: threads, tokens of each text, and ids of the vocabulary;
* ``output``: the JSON file that is written.

A text is random ids, the same for all programs. The first run is timed by itself; then the text runs until it has run
twice and for three seconds.
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
        found["peak_bytes"] = _peak_bytes()
    found["versions"] = {name: importlib.metadata.version(name) for name in embedder.PACKAGES}
    Path(request["output"]).write_text(json.dumps(found), encoding="utf-8")


def _measured(embedder: Any, model: Path, request: dict[str, Any], *, began: float) -> dict[str, Any]:
    lengths = request["lengths"]
    run = embedder.load(model, variant=request["variant"], threads=request["threads"], max_tokens=max(lengths))
    found: dict[str, Any] = {"load_s": time.perf_counter() - began, "run_s": {}, "cpu_s": {}, "embeddings": {}}
    for tokens in lengths:
        ids = np.random.default_rng(tokens).integers(_FIRST_ID, request["vocab_size"], (1, tokens))
        began = time.perf_counter()
        embedding = run(ids)
        seconds, cpu_seconds = [time.perf_counter() - began], []
        while len(seconds) <= _MIN_RUNS or sum(seconds[1:]) < _MIN_SECONDS:
            began, cpu_began = time.perf_counter(), time.process_time()
            run(ids)
            seconds.append(time.perf_counter() - began)
            cpu_seconds.append(time.process_time() - cpu_began)
        found["run_s"][tokens] = {"first": seconds[0], "median": statistics.median(seconds[1:])}
        found["cpu_s"][tokens] = statistics.median(cpu_seconds)
        found["embeddings"][tokens] = np.asarray(embedding, np.float64).tolist()
    return found


def _peak_bytes() -> int:
    """Peak resident memory of this process; `resource` would include the memory of the parent process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(sys.argv[1])
