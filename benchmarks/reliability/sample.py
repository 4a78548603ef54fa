"""The bundle and the texts that the programs of this folder disturb."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.texts import HELP


@contextlib.contextmanager
def sample_bundle() -> Iterator[Path]:
    """A bundle of the sample model in a folder of its own, for 1024 tokens, in ONNX Runtime."""
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model

    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        build(BuildOptions(model=default_model()[0], output=bundle, max_len=1024, text_length=1024, verify=None))
        yield bundle


def texts(number: int, *, shortest: int = 1, longest: int = 200) -> list[str]:
    """Different texts of `shortest` to `longest` words, in turns short and long."""
    words, found, place = HELP.split(), [], 0
    for index in range(number):
        size = shortest + (index * 7919) % (longest - shortest + 1)
        found.append(" ".join(words[(place + offset) % len(words)] for offset in range(size)))
        place += size
    return found
