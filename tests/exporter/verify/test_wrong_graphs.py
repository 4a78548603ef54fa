"""A graph that is wrong in one way is caught by the quick grid, or, where that is said here, by the full one only."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.verify import Grid, Verification, verify_bundle
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.verification import Case, Status
from support.tampered_bundles import positions_used, tampered
from support.tiny_models import BASE
from support.verified import Recorder

PORTABLE, CPU = "model.onnx", "onnxruntime_cpu.onnx"
WINDOW, BLOCKS = "window:16", "bigbird:block=4,random=3"

Change = Callable[[ir.Model], None]


@functools.cache
def reference(path: Path, checkpoint: Path) -> Reference:
    return reference_of(open_bundle(path), find_checkpoint(checkpoint))


@pytest.fixture
def verified(tiny_bundles, tmp_path) -> Callable[..., Verification]:
    """Verify a copy of a tiny bundle after a change to one graph, by default the only one that is looked at."""

    def verify(
        file: str, change: Change, grid: Grid, bundle: dict[str, Any], *, alone: bool = True, **options: Any
    ) -> Verification:
        right = tiny_bundles(**({"model_type": "bert"} | bundle))
        path = tampered(right, tmp_path / grid.value, change, file)
        manifest = right.manifest
        if alone:
            manifest = dataclasses.replace(
                manifest, graphs=tuple(graph for graph in manifest.graphs if graph.file == file)
            )
        found = reference(right.path, right.checkpoint)
        return verify_bundle(Bundle(path, manifest), found, grid=grid, **options)

    return verify


# Ways to be wrong


def constant(model: ir.Model, value: object, dtype: type = np.int64) -> ir.Value:
    node = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(value, dtype))})
    model.graph.insert_before(model.graph[0], node)
    return node.outputs[0]


def change_input(model: ir.Model, name: str, make: Callable[[ir.Value], list[ir.Node]]) -> None:
    """Let the graph read in place of an input what the last node makes of it."""
    given = next(value for value in model.graph.inputs if value.name == name)
    readers = list(given.uses())
    nodes = make(given)
    for reader, index in readers:
        reader.replace_input_with(index, nodes[-1].outputs[0])
    first = next(node for node in model.graph if node.op_type != "Constant")
    model.graph.insert_before(first, nodes)


def change_output(model: ir.Model, make: Callable[[ir.Value], list[ir.Node]]) -> None:
    """Let the graph give in place of its last output what the last node makes of it."""
    right = model.graph.outputs[-1]
    nodes = make(right)
    model.graph.extend(nodes)
    wrong, name = nodes[-1].outputs[0], right.name
    wrong.shape, wrong.type = right.shape, right.type
    right.name = f"right_{name}"
    wrong.name = name
    model.graph.outputs[-1] = wrong


def weight(model: ir.Model, part: str, change: Callable[[np.ndarray], None]) -> None:
    value = next(value for name, value in model.graph.initializers.items() if part in name)
    values = value.const_value.numpy().copy()
    change(values)
    value.const_value = ir.tensor(values, name=value.name)


def attention(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if "Attention" in node.op_type]


def frozen_length(model: ir.Model) -> None:
    # Every token from the 64th on gets the last row: what an index clamped at the traced length does.
    weight(model, "position", lambda rows: rows.__setitem__(slice(64, None), rows[63]))


def not_a_number(model: ir.Model) -> None:
    bias = model.graph.outputs[0].producer().inputs[2]
    bias.const_value = ir.tensor(np.full(bias.shape, np.nan, np.float32), name=bias.name)


def ignored(model: ir.Model, name: str, *, value: int) -> None:
    one, no = constant(model, value), constant(model, 0)
    change_input(
        model, name, lambda given: [zeros := ir.node("Mul", [given, no]), ir.node("Add", [zeros.outputs[0], one])]
    )


def leak(model: ir.Model, *, from_the_right: int) -> None:
    """Padding before the first real token, or, from the right, behind the last one, counts as real."""
    axis, no = constant(model, 1), constant(model, 0)

    def make(mask: ir.Value) -> list[ir.Node]:
        seen = ir.node("CumSum", [mask, axis], attributes={"reverse": from_the_right})
        none = ir.node("Equal", [seen.outputs[0], no])
        cast = ir.node("Cast", [none.outputs[0]], attributes={"to": ir.DataType.INT64.value})
        return [seen, none, cast, ir.node("Max", [mask, cast.outputs[0]])]

    change_input(model, "attention_mask", make)


def turned_around(model: ir.Model, value: ir.Value) -> ir.Node:
    """A node that gives the rows of a batch in the opposite order."""
    return ir.node("Slice", [value, *(constant(model, [bound]) for bound in (-1, -(2**31), 0, -1))])


def mixed_rows(model: ir.Model) -> None:
    change_output(model, lambda right: [turned_around(model, right)])


def wrong_last_token(model: ir.Model) -> None:
    first, last, one, axis = (constant(model, [value]) for value in (0, -1, 1, 1))

    def make(right: ir.Value) -> list[ir.Node]:
        others = ir.node("Slice", [right, first, last, axis])
        wrong = ir.node("Slice", [right, first, one, axis])
        return [others, wrong, ir.node("Concat", [others.outputs[0], wrong.outputs[0]], attributes={"axis": 1})]

    change_output(model, make)


def scaled_scores(model: ir.Model) -> None:
    for node in attention(model):
        node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.05)


def first_attention(name: str, value: int) -> Change:
    """Another value of an attribute of the first attention."""
    return lambda model: attention(model)[0].attributes.update({name: ir.AttrInt64(name, value)})


def wrong_head_bias(model: ir.Model) -> None:
    weight(model, "decoder.bias", lambda bias: bias.__setitem__(77, bias[77] + 1e-3))


def padding_in_front(model: ir.Model) -> None:
    """Chunks begin with their padding, so that tokens move on in batches of several chunks."""
    for loop in [node for node in model.graph if node.op_type == "Scan"]:
        padded = loop.inputs[0].producer().inputs[0].producer()
        assert padded.op_type == "Concat"
        tokens, padding = padded.inputs
        padded.replace_input_with(0, padding)
        padded.replace_input_with(1, tokens)


FILL_MASK = {"task": "fill-mask"}
CHUNKS = {"attention": "window:16", "ffn_chunk": 48}
RIGHT = ({}, {"attention": WINDOW}, {"attention": BLOCKS}, {"model_type": "longformer"}, FILL_MASK)
QUICK: dict[str, tuple[Change, str, dict[str, Any]]] = {
    "a length is frozen": (frozen_length, PORTABLE, {}),
    "NaN": (not_a_number, PORTABLE, {}),
    "the mask is ignored": (lambda model: ignored(model, "attention_mask", value=1), PORTABLE, {}),
    "padding leaks on the left": (functools.partial(leak, from_the_right=0), PORTABLE, {}),
    "token types are ignored": (lambda model: ignored(model, "token_type_ids", value=0), PORTABLE, {}),
    "rows of a batch are mixed": (mixed_rows, CPU, {}),
    "the last token is wrong": (wrong_last_token, PORTABLE, {}),
    "scores are scaled": (scaled_scores, PORTABLE, {}),
    "a window is too wide": (first_attention("right", 17), PORTABLE, {"attention": WINDOW}),
    "a block is too long": (first_attention("block_size", 5), PORTABLE, {"attention": BLOCKS}),
    "global tokens are ignored": (
        lambda model: ignored(model, "global_attention_mask", value=0),
        PORTABLE,
        {"model_type": "longformer"},
    ),
    "chunks have their padding in front": (padding_in_front, CPU, CHUNKS),
    "a bias of the vocabulary is wrong": (wrong_head_bias, PORTABLE, FILL_MASK),
}


@pytest.mark.parametrize("wrong", QUICK)
def test_the_quick_grid_catches(verified, wrong: str) -> None:
    change, file, bundle = QUICK[wrong]
    found = verified(file, change, Grid.QUICK, bundle)
    assert len(found.checks) > 5
    assert not found.passed


@pytest.mark.parametrize(
    ("wrong", "grid", "is_wrong"),
    [
        ("a length is frozen", Grid.FULL, lambda case: positions_used(case) > BASE),
        ("the mask is ignored", Grid.FULL, lambda case: case.padding != "none"),
        ("NaN", Grid.QUICK, lambda case: True),
    ],
)
def test_checks_fail_exactly_where_a_graph_is_wrong(
    verified, wrong: str, grid: Grid, is_wrong: Callable[[Case], bool]
) -> None:
    change, file, _ = QUICK[wrong]
    progress = Recorder()
    found = verified(file, change, grid, {}, alone=False, progress=progress)
    for check in found.checks:
        assert check.passed == (check.graph != file or not is_wrong(check.case)), check
    failed = [check for check in found.checks if not check.passed]
    assert [outcome for outcome in progress.outcomes if outcome in failed] == failed
    assert {check.failed_outputs for check in failed} == {("last_hidden_state",)}
    record = found.record()
    assert record.passed is False
    assert record.graphs[file].status is Status.FAIL
    json.dumps(dataclasses.asdict(record), allow_nan=False)
    assert record.graphs[file].failed == tuple(check.case for check in failed)


@pytest.mark.parametrize(("file", "bundle"), [*((CPU, bundle) for bundle in RIGHT), (PORTABLE, {}), (CPU, CHUNKS)])
def test_the_quick_grid_passes_a_right_graph(verified, file: str, bundle: dict[str, Any]) -> None:
    found = verified(file, lambda model: None, Grid.QUICK, bundle)
    assert found.passed, found.failed
    assert found.skipped == ()
    assert 8 <= len(found.checks) <= 12


# What only the full grid sees


def where_tokens(model: ir.Model, is_such: str, number: int) -> tuple[ir.Node, ...]:
    """Nodes of which the last gives whether the batch has such a number of tokens."""
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    shape = ir.node("Shape", [ids], attributes={"start": 1, "end": 2})
    return shape, ir.node(is_such, [shape.outputs[0], constant(model, [number])])


def mask_ignored_in_long_texts(model: ir.Model) -> None:
    shape, is_long = where_tokens(model, "Greater", BASE + 2)
    cast = ir.node("Cast", [is_long.outputs[0]], attributes={"to": ir.DataType.INT64.value})
    change_input(model, "attention_mask", lambda mask: [shape, is_long, cast, ir.node("Max", [mask, cast.outputs[0]])])


def wrong_at_one_length(model: ir.Model) -> None:
    shape, is_it = where_tokens(model, "Equal", BASE - 1)
    no = constant(model, 0, np.float32)
    change_output(model, lambda right: [shape, is_it, ir.node("Where", [is_it.outputs[0], no, right])])


FULL: dict[str, tuple[Change, str]] = {
    "the mask is ignored in texts of more than two tokens beyond the checkpoint": (
        mask_ignored_in_long_texts,
        PORTABLE,
    ),
    "a single length is wrong that is not a boundary of the quick grid": (wrong_at_one_length, CPU),
}


@pytest.mark.parametrize("wrong", FULL)
def test_the_full_grid_alone_catches(verified, wrong: str) -> None:
    change, file = FULL[wrong]
    assert verified(file, change, Grid.QUICK, {}).passed
    assert not verified(file, change, Grid.FULL, {}).passed
