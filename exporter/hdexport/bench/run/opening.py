"""A case's callable from what its process was told, and whether what it returns is right."""

from __future__ import annotations

__all__ = ["Call", "OpenCase", "open_case", "wrong_by"]

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hdexport.bench.measure.case import CaseSpec
from hdexport.bench.peers import PEERS
from hdexport.bench.peers.peer import Call, OpenCase
from hdexport.bench.results.result import OutputError
from hdexport.bench.run.expected import read_rows
from hdexport.verify.comparison import Comparison, compare
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, OutOfMemoryError

FloatArray = npt.NDArray[np.float32]

_PIECE = 2**22
"""Values that are compared at a time: the comparison needs several copies of them in float64."""


def open_case(spec: CaseSpec) -> OpenCase:
    """Load what runs a case; packages are imported as far as that runner needs them.

    Raises:
        HdexportError: it cannot be loaded; see `hdruntime.load`, or the peer.
    """
    with np.load(spec.inputs) as file:
        inputs = {name: file[name] for name in file.files}
    if spec.runner in PEERS:
        manifest = open_bundle(Path(spec.bundle), check_files=False).manifest
        return PEERS[spec.runner].open(spec, manifest, inputs)
    return _open_backend(spec, inputs)


def wrong_by(spec: CaseSpec, outputs: Mapping[str, FloatArray], half_precision: bool) -> OutputError | None:
    """How far outputs are from PyTorch's in float32; None where the case has nothing to compare with.

    Outputs that a peer does not have are named in the result's tolerance. An output of another shape is wrong.

    Args:
        outputs: name -> array, of the manifest's names and shapes.

    Returns:
        the worst of all outputs that PyTorch and the runner have.
    """
    if spec.expected is None:
        return None
    found: list[Comparison] = []
    missing: list[str] = []
    rows = 0
    for rows, expected in enumerate(read_rows(Path(spec.expected)), start=1):
        missing = [name for name in expected if name not in outputs]
        for name in expected.keys() & outputs.keys():
            of_row = outputs[name][rows - 1] if rows <= len(outputs[name]) else np.empty(0, np.float32)
            found += _compared(of_row, expected[name], half_precision=half_precision)
    found += [_mismatch(f"{rows} rows, not {len(values)}") for values in outputs.values() if len(values) != rows]
    if not found:
        found = [_mismatch("any output")]
    return _worst(found, missing)


def _open_backend(spec: CaseSpec, inputs: Mapping[str, npt.NDArray[np.int64]]) -> OpenCase:
    import hdruntime

    session = hdruntime.load(spec.bundle, spec.runner, threads=spec.threads)
    rows, tokens = inputs["input_ids"].shape
    if rows > session.most_rows(tokens):
        most = session.most_rows(tokens)
        raise BackendError(
            f"The engine's profiles take at most {most} texts of {tokens} tokens: a batch of {rows} runs in parts."
        )

    def call() -> dict[str, FloatArray]:
        outputs = session(**inputs)
        if rows > session.most_rows(tokens):
            raise OutOfMemoryError("The batch got no memory in one piece; the session ran it in parts.")
        return outputs

    return OpenCase(
        call=call,
        half_precision=session.manifest.dtype != "float32",
        engine_bytes=lambda: session.engine_bytes,
        close=session.close,
    )


def _compared(actual: FloatArray, expected: FloatArray, *, half_precision: bool) -> list[Comparison]:
    """Of one row: [tokens, features] by token; [features] and scores without a feature axis as one vector."""
    if actual.shape != expected.shape:
        return [_mismatch(f"shape {list(expected.shape)}, not {list(actual.shape)}")]
    actual, expected = np.atleast_2d(actual), np.atleast_2d(expected)
    step = max(1, _PIECE // expected.shape[1])
    return [
        compare(actual[start : start + step], expected[start : start + step], half_precision=half_precision)
        for start in range(0, len(expected), step)
    ]


def _mismatch(tolerance: str) -> Comparison:
    return Comparison(max_abs_error=float("inf"), min_cosine=-1.0, passed=False, tolerance=tolerance)


def _worst(found: list[Comparison], missing: list[str]) -> OutputError:
    largest = max(comparison.max_abs_error for comparison in found)
    # Of several tolerances, which only wrong answers have, that which does not hold.
    tolerance = min(found, key=lambda comparison: comparison.passed).tolerance
    return OutputError(
        max_abs_error=largest if np.isfinite(largest) else None,
        min_cosine=min(comparison.min_cosine for comparison in found),
        passed=all(comparison.passed for comparison in found),
        tolerance=tolerance + (f"; it has no {', '.join(missing)}" if missing else ""),
    )
