"""LongT5's encoders around every boundary of their windows and sides, in half precision, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers.models.longt5 import modeling_longt5

from hdexport.attention.local_global.attention_type import LocalGlobalAttention, LocalGlobalAttentionType
from hdexport.attention.local_global.model import LocalTokens
from support.answers import assert_as_hugging_face, inputs_of
from support.attention_layers import PADDINGS, token_kinds
from support.attention_records import recorded
from support.comparators import assert_close, named_case
from support.padded_batches import batches
from support.tampered_bundles import tampered
from support.verified import verified

RADIUS, SIDE = 7, 16
BLOCK = RADIUS + 1
LENGTHS = sorted(
    {edge + step for edge in (BLOCK, 2 * BLOCK, 3 * BLOCK, SIDE, 2 * SIDE, 5 * SIDE) for step in (-1, 0, 1)}
)
LOCAL = {"encoder_attention_type": "local"}

each_variant = pytest.mark.parametrize("changes", [{}, LOCAL], ids=["transient-global", "local"])


@each_variant
def test_every_boundary_of_windows_and_sides_answers_as_hugging_face(tiny_bundles, changes: dict[str, Any]) -> None:
    """With padding on the left and holes as well, where sides are by the place in the row."""
    assert_as_hugging_face(tiny_bundles("longt5", **changes), LENGTHS)


def test_half_precision_is_finite_beside_padding(tiny_bundles) -> None:
    bundle = tiny_bundles("longt5", precision="float16")
    _, ids, mask = next(batch for batch in batches(129) if batch[0] == "padding on the right, batch 3")
    mask[1] = 0
    feeds = inputs_of(bundle, ids, mask)
    for run in (bundle.portable, bundle.session):
        assert np.isfinite(run(**feeds)["last_hidden_state"]).all()


def test_sums_of_sides_are_exact_at_every_length() -> None:
    """Against the library's product with a matrix of ones and zeros, in float64. Measured 5.6e-6, of a sum of 57."""
    states = torch.randn(3, 1031, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for padding, tokens in itertools.product(PADDINGS, (1, 15, 16, 17, 31, 32, 33, 48, 255, 1024, 1031)):
        mask = torch.from_numpy(token_kinds(padding, tokens))
        block_ids, seen = modeling_longt5._make_global_fixed_block_ids(mask.float(), SIDE)
        exact = modeling_longt5._create_global_aggregates(states[:, :tokens], block_ids, seen.shape[1])
        got = LocalTokens(mask, SIDE).side_sums(states[:, :tokens])
        assert got.dtype == torch.float32
        assert got.shape[1] == -(-tokens // SIDE)
        with named_case(padding, tokens):
            for row, whole in enumerate(seen.sum(1).tolist()):
                if whole:
                    assert_close(got[row, :whole].double().numpy(), exact[row, :whole].numpy(), atol=1e-5)


def test_a_manifest_says_what_tokens_see(tiny_bundles) -> None:
    with_sides, local = tiny_bundles("longt5"), tiny_bundles("longt5", **LOCAL)
    assert recorded(with_sides.manifest, "local_global") == LocalGlobalAttention(
        layers=2, radius=RADIUS, side_tokens=SIDE
    )
    assert recorded(local.manifest, "local_global") == LocalGlobalAttention(layers=2, radius=RADIUS)
    boundaries = LocalGlobalAttentionType().boundaries(recorded(with_sides.manifest, "local_global"))
    assert boundaries is not None
    assert boundaries.lengths == set(LENGTHS)


def test_all_layers_share_one_table_of_each_kind(tiny_bundles) -> None:
    graph = tiny_bundles("longt5").graph.graph
    nodes = [node for node in graph if node.op_type.startswith("LocalGlobalAttention")]
    assert len(nodes) == 2
    for table in (4, 7):
        assert nodes[0].inputs[table] is nodes[1].inputs[table]
        assert nodes[0].inputs[table].is_initializer()
    assert json.loads((tiny_bundles("longt5").checkpoint / "config.json").read_text())["num_layers"] == 2


WRONG = {
    "numbers of another distance": lambda node: _roll(node.inputs[4]),
    "tokens left over are in no side": lambda node: _leave_out(node.graph),
}


def _roll(value: ir.Value) -> None:
    value.const_value = ir.tensor(np.roll(value.const_value.numpy(), 1, axis=1), name=value.name)


def _leave_out(graph: ir.Graph) -> None:
    """Of the sum for the last side, that of its own block is left."""
    choices = [node for node in graph if node.op_type == "Where" and node.inputs[0].producer().op_type == "Equal"]
    assert len(choices) == 2
    for choice in choices:
        choice.replace_input_with(1, choice.inputs[2])


@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_a_verification_finds_a_wrong_graph(tiny_bundles, tmp_path: Path, wrong: str | None) -> None:
    def change(model: ir.Model) -> None:
        (*_, last) = [node for node in model.graph if node.op_type.startswith("LocalGlobalAttention")]
        if wrong:
            WRONG[wrong](last)

    bundle = tiny_bundles("longt5")
    found = verified(bundle, tampered(bundle, tmp_path / "copy", change, "model.onnx"))
    assert found.passed is (wrong is None), found.failed
    assert {check.case.padding for check in found.checks} == {"none", "right", "left"}
