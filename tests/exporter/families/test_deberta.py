"""DeBERTa: which row a distance has, what is refused, and that its engine builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from hdexport.checkpoint import find_checkpoint
from hdexport.families.deberta import rows_of_distances
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.tiny_models import change_json, save_tiny_model


@pytest.mark.parametrize(("buckets", "most", "reach"), [(256, 512, 512), (9, 30, 57), (-1, 40, 40), (0, 1, 1)])
def test_every_distance_has_the_row_that_the_library_gathers(buckets: int, most: int, reach: int) -> None:
    rows = rows_of_distances(buckets=buckets, most=most)
    assert len(rows) == 2 * reach + 1
    span, tokens = buckets if buckets > 0 else most, 3 * most + 2
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)  # [queries, keys]
    counted = make_log_bucket_position(back, buckets, most).long() if buckets > 0 else back
    expected = torch.clamp(counted + span, 0, 2 * span - 1)
    assert torch.equal(rows[(-back).clamp(-reach, reach) + reach], expected)
    # The farthest distance of one direction at least is told apart from the one before it.
    assert rows[0] != rows[1] or rows[-1] != rows[-2]


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("deberta", {"talking_head": True}, "talking_head true: scores of all heads are mixed"),
        ("deberta", {"position_biased_input": True}, r'first version with a table.*\n.*"position_biased_input": false'),
    ],
)
def test_what_cannot_be_built_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        find_checkpoint(tmp_path)


def test_layers_share_the_rows_of_distances(tiny_bundles) -> None:
    bundle = tiny_bundles("deberta-v2")
    nodes = [node for node in bundle.graph.graph if node.op_type == "DisentangledAttention"]
    assert len({node.inputs[6].name for node in nodes}) == 1
    assert len({node.inputs[4].name for node in nodes}) == len(nodes) == 2
    (record,) = bundle.manifest.attention
    assert record == {"type": "disentangled", "layers": 2, "reach": 30}
    assert np.prod(nodes[0].inputs[4].shape.numpy()) == 4 * 20 * 8
