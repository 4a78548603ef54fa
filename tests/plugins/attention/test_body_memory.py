"""Bodies of attention by distance hold no scores of all tokens: in ONNX Runtime, and in TensorRT-RTX's plans.

Those of windows, blocks and hashes are in test_sparse_attention.py, of features in test_favor_attention.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from hdplugins.attention.operator import BodyVariant
from support.attention_graphs import chain_of
from support.function_bodies import growths_bytes, planned_bytes
from support.grids import nightly_unless
from support.operators import disentangled, distance, local_global, relative

MEMORY = 512
"""Tokens that `planned_bytes` lets a text remember at most, where the operator has a memory."""

CLIPPED = distance.Clipped(heads=4, head_dim=64, reach=64, by_query=True, values=True)
DISENTANGLED = disentangled.Disentangled(heads=4, head_dim=64, reach=64, number_rows=64)
RELATIVE = relative.Relative(heads=4, head_dim=64)
LOCAL = local_global.LocalGlobal(radius=127, heads=4, head_dim=64)
WITH_SIDES = replace(LOCAL, side=16, reach=128)

GROWTHS = {
    # Scores with sides are [sides, sides] per head, which is not linear: 1 MB for 8192 tokens.
    (WITH_SIDES, BodyVariant.BLOCKWISE): 2.3,
    # From 1024 to 8192 tokens it takes 16, 30, 71 and 140 MB.
    (DISENTANGLED, BodyVariant.BATCHED): 2.5,
}
"""Node and variant -> allowed ratio of the memory to the memory of half the tokens, if not 2.2."""


def all_scores_bytes(node: Any, *, texts: int = 2, tokens: int = 4096) -> int:
    """The bytes that the scores of all queries and keys would take."""
    remembered = MEMORY if isinstance(node, relative.Relative) else 0
    return texts * node.heads * tokens * (tokens + remembered) * 4


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc, which Linux has")
@pytest.mark.parametrize(
    ("node", "variant", "tokens"),
    [
        *(
            nightly_unless(variant is BodyVariant.BLOCKWISE, node, variant, 2048)
            for node in (CLIPPED, DISENTANGLED, RELATIVE)
            for variant in BodyVariant
        ),
        nightly_unless(False, LOCAL, BodyVariant.BLOCKWISE, 4096),
        (WITH_SIDES, BodyVariant.BLOCKWISE, 4096),
    ],
    ids=str,
)
def test_memory_is_linear_in_tokens(node: Any, variant: BodyVariant, tokens: int, tmp_path: Path) -> None:
    """In a process of its own. The scores of a head of 4096 tokens take 67 MB."""
    path = tmp_path / "model.onnx"
    onnx.save(chain_of([node], variant), path)
    short, long = growths_bytes(path, tokens, 2 * tokens, memory=MEMORY if node is RELATIVE else 0)
    output_bytes = 4 * tokens * 64 * 4
    assert short > output_bytes, "less than the output: nothing was measured"
    # All scores of twice the tokens would take four times the memory.
    assert long <= GROWTHS.get((node, variant), 2.2) * short
    if variant is BodyVariant.BLOCKWISE:
        assert short <= 12 * output_bytes
    else:
        # A step holds a few arrays of the scores of 128 queries.
        assert long <= 0.4 * all_scores_bytes(node, texts=1, tokens=2 * tokens)


@pytest.mark.parametrize(
    "node",
    [
        nightly_unless(node in (DISENTANGLED, WITH_SIDES), node)
        for node in (CLIPPED, DISENTANGLED, RELATIVE, WITH_SIDES)
    ],
    ids=str,
)
def test_tensorrt_rtx_builds_a_body_without_the_scores_of_all_tokens(node: Any, tmp_path: Path) -> None:
    half = replace(node, dtype="float16")
    (planned_for_long,) = planned_bytes(chain_of([half]), tmp_path, 4096, profiles=1)
    assert 0 < planned_for_long < all_scores_bytes(half)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "node",
    [
        *(replace(node, dtype="float16") for node in (CLIPPED, DISENTANGLED, RELATIVE, LOCAL, WITH_SIDES)),
        CLIPPED,
        distance.Clipped(heads=4, head_dim=64, reach=128, dtype="float16"),
        replace(CLIPPED, values=False, dtype="bfloat16"),
        DISENTANGLED,
        replace(RELATIVE, causal=1, reach=600, segments=False),
        replace(RELATIVE, reach=600, dtype="bfloat16"),
        WITH_SIDES,
        replace(WITH_SIDES, dtype="bfloat16"),
    ],
    ids=str,
)
def test_tensorrt_rtx_plans_memory_linear_in_tokens_for_every_form(node: Any, tmp_path: Path) -> None:
    short_bytes, long_bytes = planned_bytes(chain_of([node]), tmp_path, 2048, 4096)
    assert 0 < short_bytes < long_bytes < all_scores_bytes(node)
    # Scores with sides grow with the square of the tokens, a sixteenth of all.
    assert long_bytes <= (4.1 if getattr(node, "side", 0) else 2.1) * short_bytes
