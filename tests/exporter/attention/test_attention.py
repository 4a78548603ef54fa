"""The library's attention interface is mapped to our operators: nodes while a graph is made, else their definition."""

from __future__ import annotations

import pytest

from hdexport.families import SUPPORTED_MODEL_TYPES
from support.grids import EVERY_RUN_TYPES, nightly_unless

OF_OTHER_KINDS = (
    "big_bird",
    "bigbird_pegasus",
    "deberta",
    "deberta-v2",
    "embedding_gemma2_text",
    "gemma3_text",
    "led",
    "longformer",
    "longt5",
    "modernbert",
    "modernbert-decoder",
    "mt5",
    "neomme",
    "nezha",
    "performer",
    "reformer",
    "t5",
    "transfo-xl",
    "ultrabert",
    "umt5",
    "xlnet",
)
"""Model types with nodes of another kind; each has tests of its own."""

BY_DISTANCE = ("mpnet",)
"""Model types whose layers share numbers by distance."""

SCALED_BEFORE = ("esm",)
"""Model types that scale queries themselves."""


@pytest.mark.parametrize(
    "model_type",
    [nightly_unless(name in EVERY_RUN_TYPES, name) for name in SUPPORTED_MODEL_TYPES if name not in OF_OTHER_KINDS],
)
def test_every_layers_attention_is_one_node_of_ours(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    operator = "ClippedDistanceAttention" if model_type in BY_DISTANCE else "DenseAttention"
    assert bundle.manifest.operators == {f"hdexport::{operator}": 2}
    operators = {node.op_type for node in bundle.graph.graph.all_nodes()}
    assert "Softmax" not in operators
    for node in bundle.graph.graph:
        if node.op_type == operator:
            assert node.attributes["scale"].as_float() == pytest.approx(1 if model_type in SCALED_BEFORE else 8**-0.5)
            assert len(node.inputs) == (5 if model_type in BY_DISTANCE else 4)
            assert len(node.inputs[3].shape) == 2
