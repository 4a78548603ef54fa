"""A script that embeds a corpus by a bundle; like a user's job, it loads the runtime and nothing else.

``python embed_script.py REQUEST`` reads a JSON file with the ``bundle``, its ``backend``, ``precision`` and
``threads``, the texts' JSON file, ``warm_up_texts``, ``least_seconds`` that are timed, and ``output``, a ``.npy`` file
for the vectors. The script prints a line of JSON: the seconds of a call, when timing ``began`` and ``ended`` on the
machine's clock, and the tokens without and with padding; or ``status`` and ``reason`` where the bundle cannot be loaded
or run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hdruntime


def main(file: str) -> None:
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    try:
        figures = _figures(request)
    except hdruntime.HdexportError as error:
        figures = {"status": "failed", "reason": str(error)}
    print(json.dumps(figures))


def _figures(request: dict[str, Any]) -> dict[str, Any]:
    texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
    options = {name: request[name] for name in ("backend", "precision", "threads")}
    with hdruntime.load(request["bundle"], max_seq_length="bundle", **options) as session:
        session.embed(texts[:: max(1, len(texts) // request["warm_up_texts"])], overflow="truncate")
        before, calls = session.padding, 0
        began = ended = time.monotonic()
        while not calls or ended - began < request["least_seconds"]:
            vectors = session.embed(texts, overflow="truncate")
            calls, ended = calls + 1, time.monotonic()
        tokens = (session.padding.tokens - before.tokens) // calls
        padded = (session.padding.padded_tokens - before.padded_tokens) // calls
    np.save(request["output"], vectors)
    times = {"seconds": (ended - began) / calls, "began": began, "ended": ended}
    return {**times, "tokens": tokens, "computed_tokens": tokens + padded}


if __name__ == "__main__":
    main(sys.argv[1])
