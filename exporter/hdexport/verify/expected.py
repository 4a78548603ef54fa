"""A case's inputs, and PyTorch's answers to them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdexport.graph.vocabulary_head import HEAD_INPUT
from hdexport.verify.pytorch_reference import Reference
from hdruntime.arrays import AnyArray, FloatArray, IntArray
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.bundle.verification import Case, Skip, SkipCause

_RANDOM_SAMPLES = 8
"""Tokens of a batch whose logits are compared besides those at boundaries."""


class StoredRows:
    """PyTorch's outputs for cases, as `expected_rows` returns them, in files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers: dict[Case, int] = {}

    def write(self, case: Case, rows: Sequence[Mapping[str, FloatArray]]) -> None:
        arrays: dict[str, Any] = {
            f"{row}/{name}": values for row, outputs in enumerate(rows) for name, values in outputs.items()
        }
        np.savez(self._file(case), **arrays)

    def read(self, case: Case) -> list[dict[str, FloatArray]]:
        """Read the outputs for a case that was written."""
        rows: list[dict[str, FloatArray]] = [{} for _ in case.lengths]
        with np.load(self._file(case)) as arrays:
            for key, values in arrays.items():
                row, _, name = key.partition("/")
                rows[int(row)][name] = values
        return rows

    def _file(self, case: Case) -> Path:
        return self._directory / f"{self._numbers.setdefault(case, len(self._numbers))}.npz"


def padded_batch(case: Case, reference: Reference) -> dict[str, AnyArray]:
    """The inputs, [batch, tokens] each, and the recurrent states. Padding on the right holds ordinary ids, because they
    must not matter; on the left it holds the padding id, from which models of RoBERTa's kind number their positions."""
    filler = (
        np.full(case.tokens, reference.pad_token_id, np.int64)
        if case.padding == "left"
        else reference.text(case.batch, case.tokens)
    )
    of_role: dict[Role, IntArray] = {Role.IDS: np.tile(filler, (case.batch, 1))}
    for row, length in enumerate(case.lengths):
        for role, values in reference.of_text(row, length).items():
            of_role.setdefault(role, np.zeros_like(of_role[Role.IDS]))[row, case.real(length)] = values
    return reference.named(of_role, reference.past.of_case(case))


def sampled_tokens(case: Case, base: int) -> IntArray:
    """[samples], ascending: the tokens of a batch whose logits are compared where not all of them fit in memory. These
    are the first, middle and last of each row, the tokens around the checkpoint's `base` positions, and some at random.
    """
    wanted = {63, 64, base - 1, base}
    for length in case.lengths:
        real = range(case.tokens)[case.real(length)]
        wanted |= {real[0], real[length // 2], real[-1]}
    wanted |= set(np.random.default_rng(case.tokens).integers(0, case.tokens, _RANDOM_SAMPLES).tolist())
    return np.array(sorted(token for token in wanted if token < case.tokens), np.int64)


def samples_of_row(case: Case, length: int, samples: IntArray) -> npt.NDArray[np.bool_]:
    """[samples], which of a batch's samples are real tokens of a row of that length."""
    real = range(case.tokens)[case.real(length)]
    return (samples >= real.start) & (samples < real.stop)


def expected_rows(
    case: Case,
    reference: Reference,
    manifest: Manifest,
    *,
    samples: IntArray | None = None,
    decisions: Sequence[IntArray] = (),
) -> list[dict[str, FloatArray]]:
    """PyTorch's outputs for each row's text alone, because padding must change nothing but the positions that it
    shifts.

    PyTorch runs the padded batch where nothing else would do: blocks may be the batch's blocks; with padding on the
    left a classifier of Hugging Face's reads the token at index 0, even where that is padding, and some models take no
    position ids. `samples` are the tokens whose logits are computed, None for all; PyTorch follows the graph's
    `decisions`, see `hdexport.attention.attention_type.DiscreteOutputs`.
    """
    by_batch = manifest.padding is not None
    shifted = case.padding == "left" and reference.positions_shift and not reference.takes_position_ids
    reads_first = case.padding == "left" and reference.reads_first
    if (by_batch and case.padding != "none") or shifted or reads_first:
        return _expected_of_padded_rows(case, reference, manifest, samples, decisions)
    rows = []
    for row, length in enumerate(case.lengths):
        in_front = range(case.tokens)[case.real(length)].start
        of_row = None if samples is None else samples[samples_of_row(case, length, samples)] - in_front
        with _following(reference, decisions, row, slice(in_front, in_front + length)):
            recurrent = reference.past.of_row(case, row)
            rows.append(reference.unpadded(row, length, recurrent=recurrent, shift=in_front, samples=of_row))
    return rows


def _following(
    reference: Reference, decisions: Sequence[IntArray], row: int, tokens: slice
) -> contextlib.AbstractContextManager[None]:
    if reference.properties.discrete_outputs is None:
        return contextlib.nullcontext()
    return reference.properties.discrete_outputs.follow(decisions, row=row, tokens=tokens)


def _expected_of_padded_rows(
    case: Case, reference: Reference, manifest: Manifest, samples: IntArray | None, decisions: Sequence[IntArray]
) -> list[dict[str, FloatArray]]:
    """PyTorch's outputs for each row of the padded batch, given one by one so that memory is one row's."""
    inputs = padded_batch(case, reference)
    # Padding has no values among samples, and none in outputs without tokens and in recurrent states.
    with_padding = {spec.name for spec in manifest.result_outputs if "tokens" in spec.shape and samples is None} | {
        HEAD_INPUT
    }
    rows = []
    for row, length in enumerate(case.lengths):
        of_row = None if samples is None else samples[samples_of_row(case, length, samples)]
        with _following(reference, decisions, row, slice(0, case.tokens)):
            outputs = reference.batch({name: array[row : row + 1] for name, array in inputs.items()}, samples=of_row)
        rows.append({
            name: values[0, case.real(length)] if name in with_padding else values[0]
            for name, values in outputs.items()
        })  # fmt: skip
    return rows


def left_padding_skip(manifest: Manifest, reference: Reference) -> Skip | None:
    """Why padding on the left leaves nothing to compare with; None where it does. A classifier of Hugging Face's reads
    the token at index 0. If that is padding, dense attention gives it a value, which counts as an answer; in sparse
    attention it is undefined, except in Longformer, where it is 0."""
    properties, detail = reference.properties, None
    if reference.reads_first and properties.undefined_padding:
        detail = "transformers' classifier reads token 0, which sparse attention leaves undefined in padding"
    elif properties.counts_from_padding and manifest.padding is None and not reference.takes_position_ids:
        detail = "transformers counts blocks from the padding, which moves positions"
    return None if detail is None else Skip(cause=SkipCause.LEFT_PADDING, detail=detail)
