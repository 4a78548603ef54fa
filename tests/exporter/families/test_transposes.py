"""No node transposes what an operator of ours takes or gives, in any family, with any attention."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from hdexport.attention.registry import cli_syntaxes
from hdexport.families import SUPPORTED_MODEL_TYPES, convertible_model_types, family_of
from hdexport.lowering.nodes import operator_nodes, states_of
from hdplugins.attention.function_parts import transpose_heads_and_tokens
from hdplugins.op_builder import OpBuilder
from support.grids import EVERY_RUN_TYPES, nightly_unless
from support.tiny_models import COPIES

OF_LAYER = {"led": 3, "longformer": 3, "transfo-xl": 1, "xlnet": 1}
"""Model type -> nodes per layer that transpose what no operator takes or gives: a few global tokens' queries and
result, and hidden states for their scores; a table of positions, which has no batch."""

OF_GLOBAL_TOKENS = 1
"""Nodes per layer that transpose for one global token, which attends in products beside our operator: its keys are the
columns of one, as runtimes read them where they are."""

NO_GLOBAL_TOKENS = "window:16,right:0,global:0"

ATTENTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bigbird": ("bert", {"attention": "bigbird:block=4,random=3"}),
    "etc": ("distilbert", {"attention": "etc:global=3,block=64,tokens=9/8/7"}),
    "favor": ("bert", {"attention": "favor:features=48,seed=3", "attention_scale": "logn"}),
    "lsh": ("bert", {"attention": "lsh:chunk=16,rounds=2"}),
    "window": ("bert", {"attention": "window:16"}),
}
"""First word of an attention -> a bundle with it that every run builds for other claims."""

CONVERTIBLE = [name for name in convertible_model_types() if name not in COPIES]


def transposes(model: ir.Model) -> int:
    return sum(node.op_type == "Transpose" for node in model.graph.all_nodes())


def assert_transposes(model: ir.Model, per_layer: int) -> None:
    """A graph has so many nodes that transpose for each attention; none touches an attention's states or result."""
    nodes = operator_nodes(model)
    assert nodes
    assert transposes(model) == per_layer * len(nodes)
    for node in nodes:
        givers = [state.producer() for state in states_of(node)]
        assert all(giver is None or giver.op_type != "Transpose" for giver in givers)
        assert all(reader.op_type != "Transpose" for reader, _ in node.outputs[0].uses())


@pytest.mark.parametrize(
    "model_type", [nightly_unless(name in EVERY_RUN_TYPES, name) for name in SUPPORTED_MODEL_TYPES]
)
def test_no_family_transposes_around_an_operator(tiny_bundles, model_type: str) -> None:
    assert_transposes(tiny_bundles(model_type).graph, OF_LAYER.get(model_type, 0))


@pytest.mark.parametrize("word", ATTENTIONS)
def test_no_attention_transposes_around_an_operator(tiny_bundles, word: str) -> None:
    model_type, options = ATTENTIONS[word]
    assert_transposes(tiny_bundles(model_type, **options).graph, OF_GLOBAL_TOKENS if word == "window" else 0)


def test_every_attention_is_tried() -> None:
    """Blocks of a file are BigBird's, but for their places."""
    assert set(ATTENTIONS) == set(cli_syntaxes()) - {"blocks"}


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", CONVERTIBLE)
@pytest.mark.parametrize("spec", [options["attention"] for _, options in ATTENTIONS.values()] + [NO_GLOBAL_TOKENS])
def test_no_attention_of_any_family_transposes_around_an_operator(tiny_bundles, model_type: str, spec: str) -> None:
    if spec.startswith("etc") and not family_of(model_type).learned_positions:
        pytest.skip("global tokens in front of a text have no rotary position")
    assert_transposes(tiny_bundles(model_type, attention=spec).graph, OF_GLOBAL_TOKENS if spec == "window:16" else 0)


@pytest.mark.parametrize("model_type", ["bert", "esm"])
def test_one_more_node_that_transposes_is_noticed(tiny_bundles, model_type: str) -> None:
    """On the way into an operator, or anywhere else."""
    for is_near in (True, False):
        graph = ir.from_proto(ir.to_proto(tiny_bundles(model_type).graph))
        assert_transposes(graph, 0)
        node = operator_nodes(graph)[-1]
        state = states_of(node)[0]
        swapped = transpose_heads_and_tokens(OpBuilder.before(node), state)
        if is_near:
            node.replace_input_with(0, swapped)
        with pytest.raises(AssertionError):
            assert_transposes(graph, 0)
