"""A script that embeds a corpus by a bundle; like a user's job, it loads the runtime and nothing else.

``python embed_script.py REQUEST`` reads a JSON file with the ``bundle``, its ``backend``, ``precision`` and
``threads``, the texts' JSON file and ``output``, a ``.npy`` file for the vectors. The script prints a line of JSON: the
seconds, and the tokens without and with padding; or ``status`` and ``reason`` where the bundle cannot be loaded or run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hdruntime

_WARM_UP_TEXTS = 8


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
    with hdruntime.load(request["bundle"], **options) as session:
        session.embed(texts[:: max(1, len(texts) // _WARM_UP_TEXTS)], overflow="truncate")
        before = session.padding
        began = time.perf_counter()
        vectors = session.embed(texts, overflow="truncate")
        seconds = time.perf_counter() - began
        tokens = session.padding.tokens - before.tokens
        padded = session.padding.padded_tokens - before.padded_tokens
    np.save(request["output"], vectors)
    return {"seconds": seconds, "tokens": tokens, "computed_tokens": tokens + padded}


if __name__ == "__main__":
    main(sys.argv[1])
