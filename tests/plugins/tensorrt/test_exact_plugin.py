"""Plugins compute what their operators define: their kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.simulated_gpu import plugin_answers
from hdplugins.attention.plugin_spec import BlockIndexUse
from support.attention_layers import SparseLayer
from support.comparators import assert_close
from support.exact_answers import exact_answer
from support.interpreted_kernel import Inputs, Interpreter
from support.kernel_cases import inputs_of, right_answers
from support.operators.distance import inputs_of as clipped_inputs
from support.operators.relative import Relative, key_kinds
from support.operators.relative import inputs_of as relative_inputs
from support.plugin_calls import (
    BLOCK_CONFIG,
    BLOCK_LAYER,
    CHUNK_LAYER,
    CLIPPED,
    CLIPPED_LAYER,
    LSH_LAYER,
    RELATIVE,
    WINDOW,
    WINDOW_LAYER,
)

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("no_old_errors", "driver")

ATOL = {"float32": 2e-6, "float16": 2e-3}
"""Somewhat more than twice what was measured, for values of about 1: 7.6e-7 and 8.3e-4."""


def kinds(*rows: str) -> torch.Tensor:
    """Rows of a batch, one letter per token: `.` padding, `l` local, `G` global."""
    return torch.tensor([[".lG".index(letter) for letter in row] for row in rows], dtype=torch.int32)


def mask(tokens: int, *lengths: int) -> torch.Tensor:
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).int()


CASES: dict[str, tuple[SparseLayer, list[torch.Tensor]]] = {
    "globals and padding": (WINDOW_LAYER, [kinds("G" + "l" * 40 + "G" + "l" * 20 + "." * 9, "." * 30 + "l" * 41)]),
    "another length, and back": (
        replace(WINDOW_LAYER, dtype="float16"), [kinds("Gl" * 2 + "l" * tokens) for tokens in (60, 9, 60)],
    ),
    # Short, then long enough for parts and their sum, then short again.
    "blocks without a table": (
        replace(BLOCK_LAYER, heads=1, dtype="float16"), [mask(1, 1), mask(520, 520, 300), mask(1, 1)],
    ),
    "blocks with a table": (replace(BLOCK_LAYER, listed=(2, 3, 2)), [mask(1, 1), mask(200, 200, 90)]),
    "chunks": (replace(CHUNK_LAYER, dtype="float16"), [mask(tokens, tokens, 20) for tokens in (50, 31, 50)]),
    "hashes": (replace(LSH_LAYER, heads=1), [mask(tokens, tokens, 20) for tokens in (50, 31, 50)]),
}  # fmt: skip
"""What a layer is called with, one after the other; what kernels answer else is in tests/plugins/kernels."""


@pytest.mark.parametrize(("layer", "calls"), CASES.values(), ids=CASES)
def test_a_plugin_gives_the_right_answers(
    layer: SparseLayer, calls: list[torch.Tensor], interpreter: Interpreter, tmp_path: Path
) -> None:
    for inputs, answer in zip(*answers_of(layer, calls, interpreter, tmp_path), strict=True):
        assert_close(answer.numpy(), right_answers(layer, inputs).numpy(), atol=ATOL[layer.dtype])
        is_padding = inputs[layer.operator.mask] == 0
        assert (answer[is_padding] == 0).all()


SHARING: dict[str, tuple[SparseLayer, list[torch.Tensor]]] = {
    "windows": (
        WINDOW_LAYER,
        [kinds("G" + "l" * 40 + "G" + "l" * 20 + "." * 9, "." * 30 + "l" * 41, "." * 71), kinds("lGl")],
    ),
    "blocks": (replace(BLOCK_LAYER, block=16, heads=1, dtype="float16"), [mask(90, 90, 70), mask(1, 1)]),
    "blocks with a table": (replace(BLOCK_LAYER, block=16, listed=(2, 3, 2)), [mask(70, 70)]),
}
"""Layers that share a block index, and calls of them."""


@pytest.mark.parametrize(("layer", "calls"), SHARING.values(), ids=SHARING)
def test_plugins_that_share_a_block_index_give_the_right_answers(
    layer: SparseLayer, calls: list[torch.Tensor], interpreter: Interpreter, tmp_path: Path
) -> None:
    """One plugin makes the block index, in a tensor of the size that engines are built with, and another reads it."""
    uses = (BlockIndexUse.OUTPUT, BlockIndexUse.INPUT)
    given, answers = answers_of(layer, calls, interpreter, tmp_path, uses=uses)
    assert len(answers) == len(uses) * len(given)
    for number, answer in enumerate(answers):
        right = right_answers(layer, given[number // len(uses)])
        assert_close(answer.numpy(), right.numpy(), atol=ATOL[layer.dtype])


def relative_call(node: Relative, memory: int, tokens: int) -> tuple[Inputs, np.ndarray]:
    """The inputs of a call, and its right answer."""
    arrays = relative_inputs(node, key_kinds("right", tokens, memory), tokens)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, exact_answer(node, arrays)


def test_a_plugin_gives_the_right_answers_with_memories_of_any_size(interpreter: Interpreter, tmp_path: Path) -> None:
    node = Relative(reach=40, dtype="float16")
    calls, wanted = zip(*(relative_call(node, *sizes) for sizes in ((7, 30), (0, 9), (7, 30))), strict=True)
    arguments = (RELATIVE, list(calls), tmp_path / "kernels", BLOCK_CONFIG[RELATIVE], node.node_attributes)
    for answer, right in zip(interpreter.run(plugin_answers, *arguments), wanted, strict=True):
        # Somewhat more than twice what was measured, for values of about 4: 3.3e-3.
        assert_close(answer.numpy(), right, atol=8e-3)


def test_a_plugin_gives_the_right_answers_by_distance(interpreter: Interpreter, tmp_path: Path) -> None:
    layer = CLIPPED_LAYER
    arrays = [clipped_inputs(layer, mask(tokens, tokens, 20).numpy()) for tokens in (31, 1, 31)]
    calls = [{name: torch.from_numpy(array) for name, array in inputs.items()} for inputs in arrays]
    arguments = (CLIPPED, calls, tmp_path / "kernels", BLOCK_CONFIG[CLIPPED], layer.node_attributes)
    for inputs, answer in zip(arrays, interpreter.run(plugin_answers, *arguments), strict=True):
        # Somewhat more than twice what was measured, for values of up to 5: 2.3e-3.
        assert_close(answer.numpy(), exact_answer(layer, inputs), atol=5e-3)


def answers_of(
    layer: SparseLayer,
    calls: list[torch.Tensor],
    interpreter: Interpreter,
    folder: Path,
    *,
    uses: Sequence[BlockIndexUse] = (BlockIndexUse.PRIVATE,),
    **changes: Any,
) -> tuple[list[Inputs], list[torch.Tensor]]:
    name, given = layer.operator.name, [inputs_of(layer, kinds) for kinds in calls]
    attributes, block_config = layer.node_attributes | changes, BLOCK_CONFIG[name]
    if layer.node_attributes.get("block_size", 64) < 64:
        block_config = replace(block_config, block_m=16, block_n=16)
    return given, interpreter.run(plugin_answers, name, given, folder / "kernels", block_config, attributes, uses)


@pytest.mark.parametrize("wrong", [{"right": 17}, {"scale": 1.005 * WINDOW["scale"]}], ids=str)
def test_the_comparison_refuses_other_attributes(
    wrong: dict[str, Any], interpreter: Interpreter, tmp_path: Path
) -> None:
    layer = replace(WINDOW_LAYER, dtype="float16")
    (inputs,), (answer,) = answers_of(layer, [kinds("G" + "l" * 60)], interpreter, tmp_path, **wrong)
    with pytest.raises(AssertionError, match=">"):
        assert_close(answer.numpy(), right_answers(layer, inputs).numpy(), atol=ATOL["float16"])
