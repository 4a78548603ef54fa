"""Dense attention: its definition against PyTorch's own attention, and its ONNX body against its definition."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from support.attention_graphs import chain_of
from support.attention_layers import PADDINGS, token_kinds
from support.comparators import assert_as_accurate, assert_close, named_case
from support.function_bodies import new_session
from support.operators.dense import Dense

LENGTHS = (1, 63, 64, 65, 127)
HEAD_DIMS = (8, 32, 64)
FORMS = [
    Dense(),
    Dense(causal=1),
    Dense(heads=6, kv_heads=2),
    Dense(heads=4, kv_heads=1, causal=1),
]
"""Alone and in groups, causal and not."""


def feeds_of(layer: Dense, tokens: int, mask: str) -> dict:
    """Scores of some spread, so that attention is far from uniform."""
    generator = np.random.default_rng(tokens * layer.head_dim)
    shapes = {name: (3, tokens, layer.heads_of(name), layer.head_dim) for name in ("query", "key", "value")}
    feeds = {name: generator.normal(size=shape).astype(layer.dtype) for name, shape in shapes.items()}
    feeds["key_mask"] = token_kinds(mask, tokens) != 0
    return feeds


def by_reference(layer: Dense, feeds: dict[str, np.ndarray], *, dtype: torch.dtype) -> np.ndarray:
    tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}
    typed = {name: feed if name == "key_mask" else feed.to(dtype) for name, feed in tensors.items()}
    return layer.by_definition([typed[name] for name in ("query", "key", "value")], typed).numpy()


@functools.cache
def session_of(layer: Dense) -> onnxruntime.InferenceSession:
    return new_session(chain_of([layer]))


@pytest.mark.parametrize("layer", FORMS, ids=str)
def test_the_definition_is_pytorchs_attention(layer: Dense) -> None:
    layer = replace(layer, dtype="float64")
    for tokens, mask in itertools.product(LENGTHS, PADDINGS):
        feeds = feeds_of(layer, tokens, mask)
        got = by_reference(layer, feeds, dtype=torch.float64)
        query, key, value = (torch.from_numpy(feeds[name]).transpose(1, 2) for name in ("query", "key", "value"))
        real = torch.from_numpy(feeds["key_mask"])
        seen = real[:, None, None, :].expand(3, 1, tokens, tokens)
        defined = real.any(1)[:, None].expand(3, tokens)
        if layer.causal:
            seen, defined = seen & torch.ones(tokens, tokens, dtype=torch.bool).tril(), real
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        # PyTorch leaves rows without a key undefined, and sees no difference between tokens and padding.
        expected = torch.where(defined[:, None, :, None], expected, 0.0).transpose(1, 2).numpy()
        with named_case(tokens, mask):
            assert_close(got, expected, atol=1e-12)


@pytest.mark.parametrize("layer", [*(Dense(head_dim=size) for size in HEAD_DIMS), *FORMS[1:]], ids=str)
def test_the_onnx_body_matches_the_definition(layer: Dense) -> None:
    for dtype, tokens, mask in itertools.product(("float32", "float16"), LENGTHS, PADDINGS):
        typed = replace(layer, dtype=dtype)
        feeds = feeds_of(typed, tokens, mask)
        (got,) = session_of(typed).run(None, feeds)
        exact = by_reference(typed, feeds, dtype=torch.float64)
        same_dtype = by_reference(typed, feeds, dtype=getattr(torch, dtype))
        with named_case(dtype, tokens, mask):
            if mask == "all":
                assert (got[0] == 0).all()
                assert np.abs(got[1:]).max() > 0
            assert_as_accurate(*map(torch.from_numpy, (got, exact, same_dtype)))


@pytest.mark.parametrize("layer", FORMS, ids=str)
@pytest.mark.parametrize("wrong", [{"causal": 1}, {"causal": 0}, {"scale": 0.1}, {"kv_heads": "reversed"}], ids=str)
def test_another_form_gives_another_answer(layer: Dense, wrong: dict[str, Any]) -> None:
    """What is compared here can tell them apart: a key's head, an earlier key, the scale."""
    feeds = feeds_of(layer, 65, "right")
    exact = by_reference(layer, feeds, dtype=torch.float64)
    if "kv_heads" in wrong:
        # The heads of keys from the last to the first.
        changed = feeds | {name: feeds[name][:, :, ::-1].copy() for name in ("key", "value")}
        other = by_reference(layer, changed, dtype=torch.float64)
    else:
        tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}
        states = [tensors[name].double() for name in ("query", "key", "value")]
        other = layer.by_definition(states, tensors, **wrong).numpy()
    same = layer.kv_heads == 1 if "kv_heads" in wrong else wrong.get("causal") == layer.causal
    assert (np.abs(other - exact).max() < 1e-9) == same


@pytest.mark.parametrize("layer", FORMS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_content_of_padding_does_not_change_the_answer(dtype: str, layer: Dense) -> None:
    layer = replace(layer, dtype=dtype)
    feeds = feeds_of(layer, 65, "holes")
    session = session_of(layer)
    (before,) = session.run(None, feeds)
    padding = ~feeds["key_mask"][0]
    for name in ("key", "value"):
        feeds[name][0, padding] = 50.0
    (after,) = session.run(None, feeds)
    np.testing.assert_array_equal(before, after)


def test_large_scores_overflow_in_neither_dtype() -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    layer = Dense(head_dim=64, dtype="float16")
    feeds = feeds_of(layer, 64, "right")
    feeds["query"][:], feeds["key"][:] = 60.0, 60.0
    feeds["key"][:, 0] = 61.0
    (got,) = session_of(layer).run(None, feeds)
    exact = by_reference(layer, feeds, dtype=torch.float64)
    assert_close(got, exact, atol=4e-3)
