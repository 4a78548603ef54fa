"""Every face of dense attention gives the reference's answer, for all lengths and masks."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.checker
import onnxruntime
import pytest
import torch
from comparators import assert_close
from onnx import TensorProto, helper

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.dense_attention.onnx_function import function_of_arity
from hdplugins.dense_attention.reference import dense_attention

LENGTHS = (1, 2, 63, 64, 65, 127)
BATCH, HEADS = 3, 2
SCALE = 0.3

# Measured: 2e-6 in float32; in float16 the inputs' and the weights' rounding, 2^-11 each, of values up to 4.
ATOL = {np.float32: 1e-5, np.float16: 8e-3}


def masks(tokens: int) -> Iterator[tuple[str, np.ndarray]]:
    """Key masks, bool [batch, tokens]; the last row of each but the first is padding throughout."""
    index = np.arange(tokens)
    part = -(-2 * tokens // 3)
    yield "full", np.ones((BATCH, tokens), bool)
    nothing = np.zeros(tokens, bool)
    yield "right", np.stack([index < part, index < 1, nothing])
    yield "left", np.stack([index >= tokens - part, index >= tokens - 1, nothing])
    scattered = np.random.default_rng(tokens).random((2, tokens)) < 0.5
    scattered[:, tokens // 2] = True
    yield "scattered", np.stack([*scattered, nothing])
    yield "all padding", np.zeros((BATCH, tokens), bool)


def tensors(tokens: int, head_dim: int, dtype: type = np.float64) -> list[np.ndarray]:
    """Query, key, value [batch, heads, tokens, head_dim] and bias [1, heads, tokens, tokens]."""
    generator = np.random.default_rng(tokens * head_dim)
    shapes = [(BATCH, HEADS, tokens, head_dim)] * 3 + [(1, HEADS, tokens, tokens)]
    return [generator.normal(size=shape).astype(dtype) for shape in shapes]


def by_definition(query, key, value, key_mask, bias=None) -> np.ndarray:
    """The reference on float64 copies of the inputs."""
    doubles = [None if array is None else torch.from_numpy(array.astype(np.float64)) for array in (query, key, value)]
    extra = None if bias is None else torch.from_numpy(bias.astype(np.float64))
    return dense_attention(*doubles, torch.from_numpy(key_mask), extra, scale=SCALE).numpy()


@functools.cache
def function_session(arity: int, dtype: type) -> onnxruntime.InferenceSession:
    """One node with its body, all axes dynamic: one session serves every length."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = ["query", "key", "value", "key_mask", "bias"][:arity]
    inputs = [helper.make_tensor_value_info(name, kind, ["batch", "heads", "tokens", "dim"]) for name in names[:3]]
    inputs.append(helper.make_tensor_value_info("key_mask", TensorProto.BOOL, ["batch", "tokens"]))
    if arity == 5:
        inputs.append(helper.make_tensor_value_info("bias", kind, [1, "heads", "tokens", "tokens"]))
    output = helper.make_tensor_value_info("attended", kind, ["batch", "heads", "tokens", "dim"])
    node = helper.make_node("DenseAttention", names, ["attended"], domain=ONNX_DOMAIN, scale=SCALE)
    model = helper.make_model(
        helper.make_graph([node], "one_attention", inputs, [output]),
        functions=[function_of_arity(arity)],
        opset_imports=[helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("arity", [4, 5])
@pytest.mark.parametrize("head_dim", [8, 32, 64])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_function_body_is_the_reference(tokens: int, head_dim: int, arity: int, dtype: type) -> None:
    *qkv, bias = tensors(tokens, head_dim, dtype)
    session = function_session(arity, dtype)
    for _, key_mask in masks(tokens):
        feeds = {"query": qkv[0], "key": qkv[1], "value": qkv[2], "key_mask": key_mask}
        if arity == 5:
            feeds["bias"] = bias
        (got,) = session.run(None, feeds)
        want = by_definition(*qkv, key_mask, bias if arity == 5 else None)
        assert_close(got, want, atol=ATOL[dtype])


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_reference_is_softmax_attention(tokens: int) -> None:
    *qkv, bias = (torch.from_numpy(array) for array in tensors(tokens, 32))
    for name, key_mask in masks(tokens):
        seen = torch.from_numpy(key_mask)
        got = dense_attention(*qkv, seen, bias, scale=SCALE)
        rows = seen.any(dim=1)
        additive = bias + torch.where(seen[:, None, None, :], 0.0, -torch.inf)
        want = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=additive, scale=SCALE)
        if rows.any():
            assert_close(got[rows].numpy(), want[rows].numpy(), atol=1e-12)
        assert not got[~rows].any(), f"{name}: rows without a key are not 0"


def test_rows_without_a_key_are_exactly_zero_in_the_function_body() -> None:
    *qkv, _ = tensors(65, 32, np.float32)
    key_mask = np.zeros((BATCH, 65), bool)
    key_mask[0] = True
    feeds = dict(zip(("query", "key", "value"), qkv, strict=True)) | {"key_mask": key_mask}
    (got,) = function_session(4, np.float32).run(None, feeds)
    assert got[0].any()
    assert not got[1:].any()


def test_what_stands_in_padding_changes_nothing() -> None:
    query, key, value, _ = tensors(65, 32, np.float32)
    key_mask = np.broadcast_to(np.arange(65) < 40, (BATCH, 65))
    other_key, other_value = key.copy(), value.copy()
    other_key[:, :, 40:] = 1e3
    other_value[:, :, 40:] = -1e3
    session = function_session(4, np.float32)
    (plain,) = session.run(None, {"query": query, "key": key, "value": value, "key_mask": key_mask})
    (changed,) = session.run(None, {"query": query, "key": other_key, "value": other_value, "key_mask": key_mask})
    np.testing.assert_array_equal(plain, changed)


def test_the_masked_score_is_finite() -> None:
    for arity in (4, 5):
        constants = [node for node in function_of_arity(arity).node if node.op_type == "Constant"]
        values = [attribute.f for node in constants for attribute in node.attribute if attribute.type == 1]
        assert values
        assert np.isfinite(values).all()


@pytest.mark.parametrize("arity", [3, 6])
def test_there_is_a_body_for_four_and_five_inputs_only(arity: int) -> None:
    with pytest.raises(ValueError, match="4 or 5 inputs"):
        function_of_arity(arity)
