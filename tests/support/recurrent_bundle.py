"""A bundle of a recurrent model small enough to compute by hand, made without torch."""

from __future__ import annotations

__all__ = ["MEMORY", "NEW_MEMORY", "RecurrentAnswer", "make_recurrent_bundle", "recurrent_states", "with_memory_of"]

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, Role, TensorSpec
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.writer import seal
from support.onnx_models import parsed_model
from support.tiny_bundle import HIDDEN_SIZE, TABLE, make_bundle

SLOTS = 4
MEMORY, NEW_MEMORY = "memory", "new_memory"
SHAPE = ("batch", 1, SLOTS, HIDDEN_SIZE)
RATES = np.array([0.0, 0.25, 0.5, 1.0], np.float32)
"""The share of each slot that a call keeps."""


class RecurrentAnswer(NamedTuple):
    """`states`: [batch, tokens, hidden size], 0 at padding; `memory`: [batch, 1, slots, hidden size]."""

    states: np.ndarray
    memory: np.ndarray


def recurrent_states(
    input_ids: np.ndarray, attention_mask: np.ndarray | None = None, memory: np.ndarray | None = None
) -> RecurrentAnswer:
    """The model's answer: each token's vector plus the mean of the memory's slots, in float64.

    Each slot of its new memory is a share of the old slot plus the mean of the row's real vectors.
    """
    mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
    old = np.zeros((len(input_ids), *SHAPE[1:])) if memory is None else np.asarray(memory, np.float64)
    vectors = TABLE[input_ids].astype(np.float64)
    real = np.where(mask[..., None] == 1, vectors, 0)
    mean = real.sum(1) / np.maximum(mask.sum(1), 1)[:, None]
    states = np.where(mask[..., None] == 1, vectors + old.mean(axis=2), 0)
    return RecurrentAnswer(states, RATES[:, None] * old + mean[:, None, None])


def make_recurrent_bundle(directory: Path) -> Path:
    """Make a sealed bundle for feature extraction, with a tokenizer."""
    plain = open_bundle(make_bundle(directory)).manifest
    _write_model(directory / "model.onnx")
    memory = InputSpec(
        name=MEMORY,
        dtype="float32",
        shape=SHAPE,
        role=Role.MEMORY,
        default=Default(fill=Fill.ZEROS),
        fed_from=NEW_MEMORY,
    )
    left = TensorSpec(name=NEW_MEMORY, dtype="float32", shape=SHAPE)
    seal(directory, dataclasses.replace(plain, inputs=(*plain.inputs, memory), outputs=(*plain.outputs, left)))
    return directory


def with_memory_of(manifest: Manifest, *sizes: int) -> Manifest:
    """The manifest with a memory of other sizes."""

    def resized(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        changed = {MEMORY: ("batch", *sizes), NEW_MEMORY: ("batch", *sizes)}
        return tuple(dataclasses.replace(spec, shape=changed.get(spec.name, spec.shape)) for spec in specs)

    return dataclasses.replace(manifest, inputs=resized(manifest.inputs), outputs=resized(manifest.outputs))


def _write_model(path: Path) -> None:
    nodes = f"""
        vectors = Gather(table, input_ids)
        mask = Cast<to: int = 1>(attention_mask)
        mask_float = Unsqueeze(mask, axis_last)
        is_real = Equal(mask_float, one)
        real = Where(is_real, vectors, zero)
        total = ReduceSum(real, axis_tokens)
        count = ReduceSum(mask_float, axis_tokens)
        count_safe = Max(count, one)
        mean = Div(total, count_safe)
        mean_of_row = Unsqueeze(mean, axis_slots)
        kept = Mul({MEMORY}, rates)
        {NEW_MEMORY} = Add(kept, mean_of_row)
        remembered = ReduceMean<keepdims = 0>({MEMORY}, axis_slots)
        last_hidden_state = Add(vectors, remembered)
    """
    constants = {
        "table": TABLE,
        "rates": RATES[:, None],
        "axis_last": [2],
        "axis_tokens": [1],
        "axis_slots": [2],
        "one": np.float32(1),
        "zero": np.float32(0),
    }
    memory = f"float[{', '.join(map(str, SHAPE))}]"
    inputs = {**dict.fromkeys(("input_ids", "attention_mask"), "int64[batch, tokens]"), MEMORY: memory}
    outputs = {"last_hidden_state": f"float[batch, tokens, {HIDDEN_SIZE}]", NEW_MEMORY: memory}
    onnx.save(parsed_model(inputs, outputs, nodes, constants), path)
