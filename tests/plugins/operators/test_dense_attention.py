"""Dense attention: its definition against PyTorch's own attention, and its ONNX body against its definition."""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.operators.dense_attention.onnx_function import function_of_arity
from hdplugins.operators.dense_attention.reference import dense_attention
from support.comparators import assert_close

HEADS = 2
LENGTHS = (1, 63, 64, 65, 127)
HEAD_DIMS = (8, 32, 64)
MASKS = ("full", "right", "left", "scattered", "all padding")
PROTO = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def key_mask_of(kind: str, batch: int, tokens: int) -> np.ndarray:
    """[batch, tokens], bool; row 0 has the padding, the last row has none."""
    mask = np.ones((batch, tokens), bool)
    if kind == "right":
        mask[0, (tokens + 1) // 2 :] = False
    elif kind == "left":
        mask[0, : tokens // 2] = False
    elif kind == "scattered":
        mask[0] = np.random.default_rng(tokens).random(tokens) < 0.5
        mask[0, tokens // 2] = True
    elif kind == "all padding":
        mask[0] = False
    return mask


def feeds_of(tokens: int, head_dim: int, mask: str, *, dtype: str, bias_batch: int | None = None) -> dict:
    """Scores of some spread, so that attention is far from uniform."""
    generator = np.random.default_rng(tokens * head_dim)
    shape = (3, HEADS, tokens, head_dim)
    feeds = {name: generator.normal(size=shape).astype(dtype) for name in ("query", "key", "value")}
    feeds["key_mask"] = key_mask_of(mask, 3, tokens)
    if bias_batch is not None:
        feeds["bias"] = generator.normal(size=(bias_batch, HEADS, tokens, tokens)).astype(dtype)
    return feeds


def by_reference(feeds: dict[str, np.ndarray], *, dtype: torch.dtype, scale: float) -> np.ndarray:
    tensors = {name: torch.from_numpy(feed) for name, feed in feeds.items()}
    typed = {name: feed if name == "key_mask" else feed.to(dtype) for name, feed in tensors.items()}
    return dense_attention(**typed, scale=scale).numpy()


@functools.cache
def session_of(dtype: str, head_dim: int, *, bias: bool, scale: float) -> onnxruntime.InferenceSession:
    state = ["batch", HEADS, "tokens", head_dim]
    inputs = [helper.make_tensor_value_info(name, PROTO[dtype], state) for name in ("query", "key", "value")]
    inputs.append(helper.make_tensor_value_info("key_mask", TensorProto.BOOL, ["batch", "tokens"]))
    if bias:
        inputs.append(helper.make_tensor_value_info("bias", PROTO[dtype], ["bias_batch", HEADS, "tokens", "tokens"]))
    names = [value.name for value in inputs]
    node = helper.make_node("DenseAttention", names, ["attended"], domain=ONNX_DOMAIN, scale=scale)
    output = helper.make_tensor_value_info("attended", PROTO[dtype], state)
    model = helper.make_model(
        helper.make_graph([node], "attention", inputs, [output]),
        functions=[function_of_arity(len(names))],
        opset_imports=[helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("bias_batch", [None, 1, 3], ids=["no bias", "shared bias", "a bias a row"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_definition_is_pytorchs_attention(tokens: int, mask: str, bias_batch: int | None) -> None:
    feeds = feeds_of(tokens, 32, mask, dtype="float64", bias_batch=bias_batch)
    got = by_reference(feeds, dtype=torch.float64, scale=0.2)
    query, key, value = (torch.from_numpy(feeds[name]) for name in ("query", "key", "value"))
    keep = torch.from_numpy(feeds["key_mask"])[:, None, None, :]
    additive = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    if bias_batch is not None:
        additive = additive + torch.from_numpy(feeds["bias"])
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=additive.expand(3, HEADS, tokens, tokens), scale=0.2
    ).numpy()
    if mask == "all padding":
        # PyTorch leaves this undefined; the definition does not.
        assert (got[0] == 0).all()
        got, expected = got[1:], expected[1:]
    assert_close(got, expected, atol=1e-12)


@pytest.mark.parametrize("bias_batch", [None, 1, 3], ids=["no bias", "shared bias", "a bias a row"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_onnx_body_matches_the_definition(
    tokens: int, mask: str, head_dim: int, dtype: str, bias_batch: int | None
) -> None:
    scale = head_dim**-0.5
    feeds = feeds_of(tokens, head_dim, mask, dtype=dtype, bias_batch=bias_batch)
    (got,) = session_of(dtype, head_dim, bias=bias_batch is not None, scale=scale).run(None, feeds)
    exact = by_reference(feeds, dtype=torch.float64, scale=scale)
    same_dtype = by_reference(feeds, dtype=getattr(torch, dtype), scale=scale)
    # Twice the error of PyTorch in the same dtype, plus one rounding of the largest value.
    allowed = 2 * np.abs(same_dtype - exact).max() + np.abs(exact).max() * np.finfo(dtype).eps
    assert got.dtype == dtype
    if mask == "all padding":
        assert (got[0] == 0).all()
        assert np.abs(got[1:]).max() > 0
    assert_close(got, exact, atol=float(allowed))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_content_of_padding_does_not_change_the_answer(dtype: str) -> None:
    feeds = feeds_of(65, 32, "scattered", dtype=dtype)
    session = session_of(dtype, 32, bias=False, scale=0.2)
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
    (got,) = session_of("float16", 64, bias=False, scale=0.125).run(None, feeds)
    exact = by_reference(feeds, dtype=torch.float64, scale=0.125)
    assert_close(got, exact, atol=4e-3)
