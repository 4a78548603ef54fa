"""Dense attention: its definition against PyTorch's own attention, and its ONNX body against its definition."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
import pytest
import torch

from hdplugins.operators.dense_attention.reference import dense_attention
from support.attention_graphs import HEADS, Dense, chain_of
from support.comparators import assert_as_accurate, assert_close
from support.function_bodies import new_session
from support.sparse_operators import PADDINGS, token_kinds

LENGTHS = (1, 63, 64, 65, 127)
HEAD_DIMS = (8, 32, 64)


def feeds_of(tokens: int, head_dim: int, mask: str, *, dtype: str) -> dict:
    """Scores of some spread, so that attention is far from uniform."""
    generator = np.random.default_rng(tokens * head_dim)
    shape = (3, HEADS, tokens, head_dim)
    feeds = {name: generator.normal(size=shape).astype(dtype) for name in ("query", "key", "value")}
    feeds["key_mask"] = token_kinds(mask, tokens) != 0
    return feeds


def by_reference(feeds: dict[str, np.ndarray], *, dtype: torch.dtype) -> np.ndarray:
    tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}
    typed = {name: feed if name == "key_mask" else feed.to(dtype) for name, feed in tensors.items()}
    return dense_attention(**typed, scale=feeds["query"].shape[3] ** -0.5).numpy()


@functools.cache
def session_of(dtype: str, head_dim: int) -> onnxruntime.InferenceSession:
    return new_session(chain_of([Dense(head_dim=head_dim, dtype=dtype)]))


@pytest.mark.parametrize("mask", PADDINGS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_definition_is_pytorchs_attention(tokens: int, mask: str) -> None:
    feeds = feeds_of(tokens, 32, mask, dtype="float64")
    got = by_reference(feeds, dtype=torch.float64)
    query, key, value = (torch.from_numpy(feeds[name]) for name in ("query", "key", "value"))
    keep = torch.from_numpy(feeds["key_mask"])[:, None, None, :]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=keep.expand(3, HEADS, tokens, tokens)
    ).numpy()
    if mask == "all":
        # PyTorch leaves this undefined; the definition does not.
        assert (got[0] == 0).all()
        got, expected = got[1:], expected[1:]
    assert_close(got, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", PADDINGS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_onnx_body_matches_the_definition(tokens: int, mask: str, head_dim: int, dtype: str) -> None:
    feeds = feeds_of(tokens, head_dim, mask, dtype=dtype)
    (got,) = session_of(dtype, head_dim).run(None, feeds)
    exact = by_reference(feeds, dtype=torch.float64)
    same_dtype = by_reference(feeds, dtype=getattr(torch, dtype))
    if mask == "all":
        assert (got[0] == 0).all()
        assert np.abs(got[1:]).max() > 0
    assert_as_accurate(*map(torch.from_numpy, (got, exact, same_dtype)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_content_of_padding_does_not_change_the_answer(dtype: str) -> None:
    feeds = feeds_of(65, 32, "holes", dtype=dtype)
    session = session_of(dtype, 32)
    (before,) = session.run(None, feeds)
    padding = ~feeds["key_mask"][0]
    for name in ("key", "value"):
        feeds[name][0][:, padding] = 50.0
    (after,) = session.run(None, feeds)
    np.testing.assert_array_equal(before, after)


def test_large_scores_overflow_in_neither_dtype() -> None:
    """Scaled after the product, 60 x 60 x 64 would be outside float16."""
    feeds = feeds_of(64, 64, "right", dtype="float16")
    feeds["query"][:], feeds["key"][:] = 60.0, 60.0
    feeds["key"][:, :, 0] = 61.0
    (got,) = session_of("float16", 64).run(None, feeds)
    exact = by_reference(feeds, dtype=torch.float64)
    assert_close(got, exact, atol=4e-3)
