"""Checks of what a caller feeds to a session, before a backend sees it."""

from __future__ import annotations

__all__ = ["Array", "checked_inputs"]

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Fill, InputSpec, Manifest, Role
from hdruntime.errors import InputError
from hdruntime.inference.marks import check_marks, default_marks
from hdruntime.text.checks import length_error

_INT64_MAX = np.iinfo(np.int64).max

_MEANINGS = {
    Role.MASK: (1, "1 for real tokens and 0 for padding"),
    Role.TOKEN_TYPES: (None, "0 or more"),
    Role.MARKS: (1, "1 for global tokens and 0 for all others"),
    Role.POOLED: (1, "1 for tokens that are pooled and 0 for a prompt's"),
}
"""Role -> the largest value, None for any, and what values mean."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
"""An input: int64 [batch, tokens], or float32 [batch, ...] of a memory."""


def checked_inputs(given: Mapping[str, object], manifest: Manifest, *, max_len: int | None = None) -> dict[str, Array]:
    """The inputs of the bundle's graphs, defaults filled in.

    Args:
        given: name -> array, tensor or nested list: integers [batch, tokens], masks and marks also as booleans; of a
            memory floats of the manifest's shape. What is left out, or None, is what the manifest says.
        manifest: what the bundle accepts.
        max_len: most tokens, where what runs the bundle takes fewer than the manifest says.

    Returns:
        name -> int64 [batch, tokens], or, of a memory, float32 of the manifest's shape; in the manifest's order.

    Raises:
        InputError: a name, shape, type, id or length does not fit; the message says which and what would.
    """
    accepted = [spec.name for spec in manifest.inputs]
    for name in given:
        if name not in accepted:
            raise InputError(f"Unknown input {name!r}; this bundle accepts {', '.join(accepted)}.")
    for spec in manifest.inputs:
        if spec.default.fill is Fill.REQUIRED and given.get(spec.name) is None:
            raise InputError(f"{spec.name} is missing; give it as integers of shape [batch, tokens].")
    ids = _integers(given[manifest.ids], manifest.ids)
    tokens, most = ids.shape[1], max_len or manifest.max_len
    if not 1 <= tokens <= most:
        raise length_error("Input", tokens, most, "Truncate it")
    read = {manifest.ids: ids} | {
        spec.name: _read(given[spec.name], spec)
        for spec in manifest.inputs
        if spec.name != manifest.ids and given.get(spec.name) is not None
    }
    for spec in manifest.inputs:
        if spec.name in read:
            _check_shape(spec, read[spec.name], ids, manifest.ids)
    _check_ids(ids, manifest.ids, manifest.vocab_size)
    mask = read.setdefault(manifest.mask, np.ones_like(ids))
    for spec in manifest.inputs:
        if spec.name not in read:
            read[spec.name] = _default(spec, ids, mask)
        elif spec.role in _MEANINGS:
            _check_range(spec.name, read[spec.name], *_MEANINGS[spec.role])
        if spec.role is Role.MARKS:
            check_marks(spec, read[spec.name], mask)
    return {name: read[name] for name in accepted}


def _default(spec: InputSpec, ids: IntArray, mask: IntArray) -> Array:
    if spec.role is Role.MEMORY:
        return np.zeros((len(ids), *_sizes(spec)), np.float32)
    if spec.default.fill in (Fill.FIRST_TOKEN, Fill.UNTIL_TOKEN):
        return default_marks(spec, ids, mask)
    if spec.default.fill is Fill.AFTER_TOKEN:
        # Of a row without such a token, as Hugging Face's BigBird has it, from token 1.
        first = (ids == spec.default.token_id).argmax(axis=1)
        return (np.arange(ids.shape[1]) > first[:, None]).astype(np.int64)
    return np.full_like(ids, int(spec.default.fill is Fill.ONES))


def _read(value: object, spec: InputSpec) -> Array:
    if spec.role is Role.MEMORY:
        return _floats(value, spec)
    return _integers(value, spec.name, may_be_boolean=spec.role in (Role.MASK, Role.MARKS, Role.POOLED))


def _floats(value: object, spec: InputSpec) -> FloatArray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{spec.name} cannot be read as an array {_shown(spec)}: {error}.") from error
    if array.dtype.kind != "f":
        raise InputError(f"{spec.name} is of type {array.dtype}; it must be float32.")
    if array.ndim != len(spec.shape):
        raise InputError(f"{spec.name} has shape {list(array.shape)}; it must be {_shown(spec)}.")
    if not np.isfinite(array).all():
        raise InputError(f"{spec.name} holds NaN or infinity; it must be what the call before gave, or be left out.")
    return np.ascontiguousarray(array, dtype=np.float32)


def _sizes(spec: InputSpec) -> tuple[int, ...]:
    """Of a memory: all axes but the batch."""
    return tuple(int(size) for size in spec.shape[1:])


def _shown(spec: InputSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


def _integers(value: object, name: str, *, may_be_boolean: bool = False) -> IntArray:
    """The value as an int64 array [batch, tokens], or an error that says why it is none."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        # Ragged lists, and tensors that are not in the CPU's memory.
        raise InputError(
            f"{name} cannot be read as an array [batch, tokens]: {error}.\n"
            "Pad shorter rows and mark the padding with 0 in attention_mask."
        ) from error
    if array.ndim != 2:
        raise InputError(
            f"{name} has shape {list(array.shape)}; it must be [batch, tokens].\n"
            "Put a single document into a list: [ids]."
        )
    if array.shape[0] == 0:
        raise InputError(f"{name} has shape {list(array.shape)}: the batch is empty; give at least one row.")
    if array.size and array.dtype == object:
        # What numpy makes of integers beyond 64 bits; lists of numbers give nothing else of this type.
        raise InputError(f"{name} holds values that are not integers of at most 64 bits.")
    if array.size and array.dtype.kind not in ("iub" if may_be_boolean else "iu"):
        raise InputError(f"{name} is of type {array.dtype}; it must be integers, for example int64.")
    if array.size and array.dtype == np.uint64 and int(array.max()) > _INT64_MAX:
        raise InputError(f"{name} holds {int(array.max())}, which is more than int64 can hold ({_INT64_MAX}).")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_shape(spec: InputSpec, array: Array, ids: IntArray, ids_name: str) -> None:
    if spec.role is not Role.MEMORY and array.shape != ids.shape:
        raise InputError(
            f"{spec.name} has shape {list(array.shape)}, but {ids_name} {list(ids.shape)}; they must be equal."
        )
    if spec.role is Role.MEMORY and array.shape != (len(ids), *_sizes(spec)):
        raise InputError(
            f"{spec.name} has shape {list(array.shape)}; for {len(ids)} rows it must be {_shown(spec)}: what the call "
            "before gave for the same rows."
        )


def _check_ids(input_ids: IntArray, name: str, vocab_size: int) -> None:
    # What is negative is enormous without a sign, so one look at each id will do.
    if input_ids.view(np.uint64).max() >= vocab_size:
        row, token = map(int, np.argwhere((input_ids < 0) | (input_ids >= vocab_size))[0])
        raise InputError(
            f"{name}[{row}, {token}] is {input_ids[row, token]}; "
            f"the vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}.\n"
            "Tokenize with the bundle's own tokenizer.json (session.tokenize does)."
        )


def _check_range(name: str, array: Array, highest: int | None, meaning: str) -> None:
    most = _INT64_MAX if highest is None else highest
    if array.view(np.uint64).max() > most:
        row, token = map(int, np.argwhere((array < 0) | (array > most))[0])
        raise InputError(f"{name}[{row}, {token}] is {array[row, token]}; it must be {meaning}.")
