"""Bundles of recurrent models small enough to compute by hand, made without torch.

One has a memory of a fixed size; the other remembers its last tokens, as `hdexport.model.memory_cache` names them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, Role, TensorSpec
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from support.onnx_models import parsed_model
from support.tiny_bundle import HIDDEN_SIZE, TABLE, make_bundle

SLOTS = 4
MEMORY, NEW_MEMORY = "memory", "new_memory"
SHAPE = ("batch", 1, SLOTS, HIDDEN_SIZE)
RATES = np.array([0.0, 0.25, 0.5, 1.0], np.float32)
"""The share of each slot that a call keeps."""


REMEMBERED = 6
"""The most tokens that the other bundle remembers."""


_OF_TOKENS = {
    "token-classification": TensorSpec(name="logits", dtype="float32", shape=("batch", "tokens", HIDDEN_SIZE)),
    "text-scoring": TensorSpec(name="log_probabilities", dtype="float32", shape=("batch", "tokens")),
}
"""Tasks whose outputs are of each token."""


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
        role=Role.RECURRENT_STATE,
        default=Default(fill=Fill.ZEROS),
        fed_from=NEW_MEMORY,
    )
    left = TensorSpec(name=NEW_MEMORY, dtype="float32", shape=SHAPE)
    seal(directory, dataclasses.replace(plain, inputs=(*plain.inputs, memory), outputs=(*plain.outputs, left)))
    return directory


class TokensAnswer(NamedTuple):
    """`states`: [batch, tokens, hidden size], 0 at padding; `vectors` and `mask`: the new [batch, memory, ...]."""

    states: np.ndarray
    vectors: np.ndarray
    mask: np.ndarray


def tokens_answer(
    input_ids: np.ndarray, attention_mask: np.ndarray, vectors: np.ndarray, mask: np.ndarray
) -> TokensAnswer:
    """One call of the model that remembers tokens, in float64: each vector plus the mean of the remembered vectors.

    Padding behind a row is not remembered, as `hdexport.model.memory_cache.updated_memory` has it.

    Args:
        input_ids, attention_mask: int64 [batch, tokens].
        vectors: [batch, memory, hidden size], of the last tokens of earlier calls.
        mask: [batch, memory], 1 for tokens that are there.
    """
    own = TABLE[input_ids].astype(np.float64)
    count = np.maximum(mask.sum(1), 1)[:, None]
    remembered = np.where(mask[..., None] > 0, vectors, 0).sum(1) / count
    states = np.where(attention_mask[..., None] == 1, own + remembered[:, None], 0)
    ends = (attention_mask * np.arange(1, input_ids.shape[1] + 1)).max(axis=1)
    together = np.concatenate([vectors, own], axis=1), np.concatenate([mask, attention_mask], axis=1)
    left = (np.stack([row[end : end + mask.shape[1]] for row, end in zip(of, ends, strict=True)]) for of in together)
    return TokensAnswer(states, *left)


def streamed_states(ids: Sequence[int], segment: int, *, attended: bool = False) -> np.ndarray:
    """[tokens, hidden size]: a document's states, in segments with full memory, in float64.

    Args:
        ids: of the document.
        segment: tokens of a segment.
        attended: whether tokens that are not yet there count, as vectors of zeros.
    """
    vectors = TABLE[np.asarray(ids)].astype(np.float64)
    states = vectors.copy()
    for start in range(0, len(ids), segment):
        before = vectors[max(0, start - REMEMBERED) : start]
        count = REMEMBERED if attended else max(1, len(before))
        states[start : start + segment] += before.sum(0) / count
    return states


def make_streaming_bundle(
    directory: Path,
    *,
    task: str = "feature-extraction",
    attended: bool = False,
    max_len: int = 16,
    sentence: SentenceSettings | None = None,
) -> Path:
    """Make a sealed bundle, with a tokenizer, of the model that remembers its last `REMEMBERED` tokens.

    Args:
        directory: of the bundle.
        task: feature-extraction; sentence-similarity, whose vectors are the mean of a call's states, with length 1;
            text-classification, whose logits are that mean; token-classification, whose logits are the states; or
            text-scoring, whose numbers are the first of each state.
        attended: tokens that are not yet there are attended to, as in Transformer-XL.
        max_len: most tokens of a call.
        sentence: how sentence-transformers runs it.
    """
    of_tokens = _OF_TOKENS.get(task)
    plain = open_bundle(make_bundle(directory, task=task if of_tokens is None else "feature-extraction")).manifest
    answers = plain.outputs if of_tokens is None else (of_tokens,)
    fill = Default(fill=Fill.ONES if attended else Fill.ZEROS)
    zeros = Default(fill=Fill.ZEROS)
    carried = tuple(
        InputSpec(
            name=f"mems.{part}",
            dtype="float32",
            shape=("batch", "memory", *sizes),
            role=Role.RECURRENT_STATE,
            default=default,
            bound=REMEMBERED,
            fed_from=f"new_mems.{part}",
        )
        for part, sizes, default in (("0", (HIDDEN_SIZE,), zeros), ("mask", (), fill))
    )
    left = tuple(TensorSpec(name=str(spec.fed_from), dtype="float32", shape=spec.shape) for spec in carried)
    _write_tokens_model(directory / "model.onnx", answers)
    changed = dataclasses.replace(
        plain,
        inputs=(*plain.inputs, *carried),
        outputs=(*answers, *left),
        task=task,
        max_len=max_len,
        positions=dataclasses.replace(plain.positions, rows=max_len),
        sentence=sentence,
    )
    seal(directory, changed)
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


def _write_tokens_model(path: Path, answers: Sequence[TensorSpec]) -> None:
    """The answers: the states, and the mean of a row's."""
    nodes = """
        own = Gather(table, input_ids)
        given = Unsqueeze(mems_mask, axis_last)
        is_given = Greater(given, zero)
        there = Where(is_given, mems_0, zero)
        total = ReduceSum(there, axis_tokens)
        count = ReduceSum(given, axis_tokens)
        count_safe = Max(count, one)
        remembered = Div(total, count_safe)
        states = Add(own, remembered)
        mask = Cast<to: int = 1>(attention_mask)
        mask_last = Unsqueeze(mask, axis_last)
        is_real = Greater(mask_last, zero)
        real = Where(is_real, states, zero)
        total_of_row = ReduceSum<keepdims = 0>(real, axis_tokens)
        tokens_of_row = ReduceSum<keepdims = 0>(mask_last, axis_tokens)
        tokens_safe = Max(tokens_of_row, one)
        mean = Div(total_of_row, tokens_safe)
        tokens = Shape<start = 1, end = 2>(input_ids)
        number_of_tokens = Squeeze(tokens)
        token_places = Range(zero_id, number_of_tokens, one_id)
        places_from_one = Add(token_places, one_id)
        real_places = Mul(attention_mask, places_from_one)
        ends = ReduceMax(real_places, axis_tokens)
        memory = Shape<start = 1, end = 2>(mems_0)
        number_remembered = Squeeze(memory)
        memory_places = Range(zero_id, number_remembered, one_id)
        kept = Add(ends, memory_places)
        all_masks = Concat<axis = 1>(mems_mask, mask)
        new_mems_mask = GatherElements<axis = 1>(all_masks, kept)
        kept_last = Unsqueeze(kept, axis_last)
        shape = Shape(mems_0)
        kept_vectors = Expand(kept_last, shape)
        all_vectors = Concat<axis = 1>(mems_0, own)
        new_mems_0 = GatherElements<axis = 1>(all_vectors, kept_vectors)
    """
    for answer in answers:
        if answer.name == "log_probabilities":
            nodes += "log_probabilities = Gather<axis = 2>(states, zero_id)\n"
        elif answer.has_tokens_axis:
            nodes += f"{answer.name} = Identity(states)\n"
        elif answer.name == "sentence_embedding":
            nodes += f"{answer.name} = LpNormalization<axis = 1>(mean)\n"
        else:
            nodes += f"{answer.name} = Identity(mean)\n"
    constants = {
        "table": TABLE,
        "axis_last": [2],
        "axis_tokens": [1],
        "zero_id": 0,
        "one_id": 1,
        "one": np.float32(1),
        "zero": np.float32(0),
    }
    shapes = {"mems_0": f"float[batch, memory, {HIDDEN_SIZE}]", "mems_mask": "float[batch, memory]"}
    inputs = {**dict.fromkeys(("input_ids", "attention_mask"), "int64[batch, tokens]"), **shapes}
    outputs = {answer.name: f"float[{', '.join(map(str, answer.shape))}]" for answer in answers}
    model = parsed_model(inputs, outputs | {f"new_{name}": shape for name, shape in shapes.items()}, nodes, constants)
    _rename(
        model.graph, {name: name.replace("mems_", "mems.") for name in (*shapes, *(f"new_{name}" for name in shapes))}
    )
    onnx.save(model, path)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Names with a dot, which the parser does not read."""
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
