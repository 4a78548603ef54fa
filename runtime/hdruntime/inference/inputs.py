"""Checks of what a caller feeds to a session, before a backend sees it."""

from __future__ import annotations

__all__ = ["checked_inputs"]

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError
from hdruntime.inference.marks import check_global_tokens, default_global_attention_mask
from hdruntime.text.checks import length_error

_MASKS = ("attention_mask", "global_attention_mask")
"""Inputs that may be boolean."""

_INT64_MAX = np.iinfo(np.int64).max

IntArray = npt.NDArray[np.int64]


def checked_inputs(
    given: Mapping[str, object], manifest: Manifest, *, max_len: int | None = None
) -> dict[str, IntArray]:
    """The inputs of the bundle's graphs as int64 arrays [batch, tokens], defaults filled in.

    Args:
        given: name -> array, tensor or nested list of integers; masks may be boolean. ``attention_mask`` defaults to
            ones, ``token_type_ids`` to zeros or, as ``global_attention_mask``, to what the manifest says.
        manifest: what the bundle accepts.
        max_len: most tokens, where what runs the bundle takes fewer than the manifest says.

    Raises:
        InputError: a name, shape, type, id or length does not fit; the message says which and what would.
    """
    accepted = [spec.name for spec in manifest.inputs]
    for name in given:
        if name not in accepted:
            raise InputError(f"Unknown input {name!r}; this bundle accepts {', '.join(accepted)}.")
    if given.get("input_ids") is None:
        raise InputError("input_ids is missing; give it as integers of shape [batch, tokens].")
    input_ids = _integers("input_ids", given["input_ids"])
    tokens, most = input_ids.shape[1], max_len or manifest.max_len
    if not 1 <= tokens <= most:
        raise length_error("Input", tokens, most, "Truncate it")
    inputs = {"input_ids": input_ids}
    for name in accepted:
        if name != "input_ids":
            value = given.get(name)
            inputs[name] = _default(name, input_ids, manifest) if value is None else _integers(name, value)
    _check_shapes(inputs)
    _check_ids(input_ids, manifest.vocab_size)
    if given.get("attention_mask") is not None:
        _check_range("attention_mask", inputs["attention_mask"], 1, "1 for real tokens and 0 for padding")
    if given.get("token_type_ids") is not None:
        _check_range("token_type_ids", inputs["token_type_ids"], None, "0 or more")
    _fill_or_check_global_tokens(given, inputs, manifest)
    return inputs


def _fill_or_check_global_tokens(given: Mapping[str, object], inputs: dict[str, IntArray], manifest: Manifest) -> None:
    global_attention, name = manifest.global_attention, "global_attention_mask"
    if global_attention is None:
        return
    if given.get(name) is None:
        inputs[name] = default_global_attention_mask(inputs["input_ids"], inputs["attention_mask"], global_attention)
        return
    _check_range(name, inputs[name], 1, "1 for global tokens and 0 for all others")
    check_global_tokens(inputs[name], inputs["attention_mask"], global_attention)


def _default(name: str, input_ids: IntArray, manifest: Manifest) -> IntArray:
    if name == "attention_mask":
        return np.ones_like(input_ids)
    if name == "token_type_ids" and manifest.token_type_separator_id is not None:
        return _types_by_separator(input_ids, manifest.token_type_separator_id)
    return np.zeros_like(input_ids)


def _types_by_separator(input_ids: IntArray, separator_id: int) -> IntArray:
    """0 up to the first separator, 1 behind it; where there is none, as Hugging Face's BigBird has it, from token 1."""
    first = (input_ids == separator_id).argmax(axis=1)
    return (np.arange(input_ids.shape[1]) > first[:, None]).astype(np.int64)


def _integers(name: str, value: object) -> IntArray:
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
    if array.size and array.dtype.kind not in ("iub" if name in _MASKS else "iu"):
        raise InputError(f"{name} is of type {array.dtype}; it must be integers, for example int64.")
    if array.size and array.dtype == np.uint64 and int(array.max()) > _INT64_MAX:
        raise InputError(f"{name} holds {int(array.max())}, which is more than int64 can hold ({_INT64_MAX}).")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_shapes(inputs: dict[str, IntArray]) -> None:
    expected = inputs["input_ids"].shape
    for name, array in inputs.items():
        if array.shape != expected:
            raise InputError(
                f"{name} has shape {list(array.shape)}, but input_ids {list(expected)}; they must be equal."
            )


def _check_ids(input_ids: IntArray, vocab_size: int) -> None:
    # What is negative is enormous without a sign, so one look at each id will do.
    if input_ids.view(np.uint64).max() >= vocab_size:
        row, token = map(int, np.argwhere((input_ids < 0) | (input_ids >= vocab_size))[0])
        raise InputError(
            f"input_ids[{row}, {token}] is {input_ids[row, token]}; "
            f"the vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}.\n"
            "Tokenize with the bundle's own tokenizer.json (session.tokenize does)."
        )


def _check_range(name: str, array: IntArray, highest: int | None, meaning: str) -> None:
    most = _INT64_MAX if highest is None else highest
    if array.view(np.uint64).max() > most:
        row, token = map(int, np.argwhere((array < 0) | (array > most))[0])
        raise InputError(f"{name}[{row}, {token}] is {array[row, token]}; it must be {meaning}.")
