"""A case's callable from its description, and whether its answer is right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hdexport.bench.measure.case import CaseSpec
from hdexport.bench.peers import PEERS
from hdexport.bench.peers.peer import OpenCase
from hdexport.bench.results.result import OutputError
from hdexport.verify.comparison import Comparison, compare_output, joined
from hdruntime.arrays import FloatArray
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, OutOfMemoryError


def open_case(spec: CaseSpec) -> OpenCase:
    """Load the runner of a case; packages are imported as far as that runner needs them.

    Raises:
        HdexportError: the runner cannot be loaded; see `hdruntime.load`, or the peer.
    """
    with np.load(spec.inputs) as file:
        inputs = {name: file[name] for name in file.files}
    # A peer may have the name of a backend.
    if spec.artefact is not None:
        manifest = open_bundle(spec.bundle, check_files=False).manifest
        # Peers run each text alone.
        of_text = {spec.name: inputs[spec.name] for spec in manifest.inputs if spec not in manifest.memories}
        return PEERS[spec.runner].open(spec, manifest, of_text)
    return _open_backend(spec, inputs)


def wrong_by(expected: Path, outputs: Mapping[str, FloatArray], case: OpenCase) -> OutputError:
    """How far outputs are from PyTorch's in float32.

    Outputs that a peer does not have are named in the result's tolerance. An output of another shape is wrong.

    Args:
        expected: a folder of the right outputs, as in `CaseSpec`.
        outputs: name -> array, of the manifest's names and shapes.
        case: the case that returned them; their tolerances depend on its precision.

    Returns:
        the worst of all outputs that PyTorch and the runner have.
    """
    right = {file.stem: np.load(file, mmap_mode="r") for file in sorted(expected.iterdir())}
    found = [_compared(name, outputs[name], values, case) for name, values in right.items() if name in outputs]
    worst = joined(found or [_mismatch("any output")])
    missing = ", ".join(name for name in right if name not in outputs)
    return OutputError(
        max_abs_error=worst.max_abs_error if np.isfinite(worst.max_abs_error) else None,
        min_cosine=worst.min_cosine,
        passed=worst.passed,
        tolerance=worst.tolerance + (f"; it has no {missing}" if missing else ""),
    )


def _open_backend(spec: CaseSpec, inputs: Mapping[str, npt.NDArray[np.int64]]) -> OpenCase:
    import hdruntime

    session = hdruntime.load(spec.bundle, spec.runner, threads=spec.threads, precision=spec.precision)
    rows, tokens = inputs["input_ids"].shape
    if rows > session.most_rows(tokens):
        most = session.most_rows(tokens)
        raise BackendError(
            f"The engine's profiles take at most {most} texts of {tokens} tokens: a batch of {rows} runs in parts."
        )

    def call() -> dict[str, FloatArray]:
        outputs = session(**inputs)
        if rows > session.most_rows(tokens):
            raise OutOfMemoryError("The batch did not fit in memory at once; the session ran it in parts.")
        return outputs

    return OpenCase(
        call=call,
        half_precision=session.manifest.dtype != "float32",
        precision=session.precision,
        engine_bytes=lambda: session.engine_bytes,
        close=session.close,
    )


def _compared(name: str, actual: FloatArray, expected: FloatArray, case: OpenCase) -> Comparison:
    """[batch, tokens, features] by token; [batch, features], and scores without a feature axis, by text."""
    if actual.shape != expected.shape:
        return _mismatch(f"shape {list(expected.shape)}, not {list(actual.shape)}")
    # Scores without a feature axis, [batch, tokens], are a vector per text to that.
    return compare_output(
        name,
        np.atleast_2d(actual),
        np.atleast_2d(expected),
        half_precision=case.half_precision,
        precision=case.precision,
        of_tokens=actual.ndim > 2,
    )


def _mismatch(tolerance: str) -> Comparison:
    return Comparison(max_abs_error=float("inf"), min_cosine=-1.0, passed=False, tolerance=tolerance)
