"""An export rewrites composites and leaves out repetitions: the graph is that of two traces in full."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import hdexport.graph.tracing
from hdexport.build import BuildOptions, build
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdexport.graph.tracing import Trace, trace
from hdexport.model.graph_module import GraphModule, graph_inputs
from hdruntime.bundle.manifest import Task
from support.graph_fingerprints import fingerprint
from support.hugging_face import ALPHA
from support.tiny_models import VOCAB_SIZE

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states, [batch, tokens, 8], to hidden states."""


class Computing(GraphModule):
    """Hidden states of ids, and what a function makes of them."""

    def __init__(self, compute: Compute) -> None:
        super().__init__(torch.nn.Identity(), Task.FEATURE_EXTRACTION, inputs=graph_inputs(token_types=0))
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(VOCAB_SIZE, 8, generator=generator))
        self.compute = compute

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.compute(self.table[input_ids] * attention_mask[..., None]),)


def all_that_rules_cover(states: torch.Tensor) -> torch.Tensor:
    batch, tokens, width = states.shape
    heads = states.unflatten(-1, (2, 4)).transpose(1, 2)
    states = heads.transpose(1, 2).flatten(2)
    states = heads.transpose(1, 2).reshape(batch, tokens, width) + states.contiguous()
    first, second = states.chunk(2, dim=-1)
    states = torch.cat([second.square(), first.to(torch.float64).to(torch.float32)], dim=-1)
    states = states + states.narrow(1, 0, 1).expand_as(states) + states.narrow(2, 3, 1)
    odd = (torch.arange(tokens)[:, None] % 2 == 1) & (torch.arange(width)[None] > 2)
    odd = odd | (torch.arange(width)[None] == 1)
    states = torch.where(odd, states[:, :, :], states * 2) @ torch.ones(width, width).T
    changed = states * 1.0
    changed.mul_(3.0)
    changed.add_(states)
    return changed.view(batch, tokens, width)


def mixed_types(states: torch.Tensor) -> torch.Tensor:
    """Every operator has factors of two types, which ONNX wants cast; a result is used by operators of either type."""
    places = torch.arange(states.shape[1])[:, None]
    scaled = states * places + places / 3 + (places > 2)
    halves = scaled.to(torch.float16) + states
    return torch.where(places < 4, halves * places.to(torch.float64), scaled).to(torch.float32) / 7


def turned_products(states: torch.Tensor) -> torch.Tensor:
    """A norm, GELU and products of states in another order, in which what follows is viewed or copied."""
    turned = torch.nn.functional.layer_norm(states.transpose(0, 1), (8,), torch.arange(8.0), torch.ones(8))
    wide = torch.nn.functional.linear(torch.nn.functional.gelu(turned), torch.ones(12, 8), torch.arange(12.0))
    heads = wide.transpose(0, 1).unflatten(-1, (3, 4)).transpose(1, 2)
    normed = torch.nn.functional.layer_norm(heads, (4,)).transpose(1, 2).flatten(2)
    return torch.nn.functional.gelu(normed, approximate="tanh").contiguous() + turned.transpose(0, 1).sum(-1, True)


def changed_view(states: torch.Tensor) -> torch.Tensor:
    copied = states * 1.0
    part = copied[:, :, :2]
    part.mul_(5.0)
    return copied


def read_before_and_after(states: torch.Tensor) -> torch.Tensor:
    copied = states * 1.0
    before = copied + 1.0
    copied.mul_(2.0)
    return before * copied


def changed_copy(states: torch.Tensor) -> torch.Tensor:
    """PyTorch copies a product in the order of its transposed factor, and changes the copy alone."""
    product = states.transpose(1, 2) * 2.0
    product.contiguous().mul_(3.0)
    return product.transpose(1, 2)


def changed_cast(states: torch.Tensor) -> torch.Tensor:
    copied = states + 1.0
    copied.to(torch.float32, copy=True).mul_(3.0)
    return copied


def changed_by_another_dtype(states: torch.Tensor) -> torch.Tensor:
    """What is changed stays float32; a product would be float64."""
    copied = states * 1.0
    copied.mul_(states.double() / 3)
    return copied


def moved_axis(states: torch.Tensor) -> torch.Tensor:
    return states.movedim(2, 1).movedim(1, 2) * 2.0


def answer(model: ir.Model, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (found,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    return found


@pytest.fixture
def second_traces(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the exports so far have logged of second traces."""
    caplog.set_level(logging.INFO, logger="hdexport.graph.composites")
    return lambda: [record.getMessage() for record in caplog.records if "second time" in record.getMessage()]


in_full: Callable[..., Trace] = trace.__wrapped__
"""`trace` that leaves out no repetition."""


def traced_twice(module: GraphModule, monkeypatch: pytest.MonkeyPatch) -> ir.Model:
    with monkeypatch.context() as patch:
        patch.setattr(hdexport.graph.tracing, "composites_rewritten", contextlib.nullcontext)
        return in_full(module, max_len=64, vocab_size=VOCAB_SIZE).model


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (all_that_rules_cover, None),
        (mixed_types, None),
        (turned_products, None),
        (read_before_and_after, None),
        (changed_view, "aten.mul_"),
        (changed_copy, "aten.contiguous"),
        (changed_cast, "aten.to.dtype"),
        (changed_by_another_dtype, "aten.mul_"),
        (moved_axis, "aten.movedim"),
    ],
)
@torch.inference_mode()
def test_a_graph_is_that_of_two_traces_in_full_and_answers_as_pytorch(
    compute: Compute, reason: str | None, monkeypatch: pytest.MonkeyPatch, second_traces: Callable[[], list[str]]
) -> None:
    module = Computing(compute).eval()
    graph = trace(module, max_len=64, vocab_size=VOCAB_SIZE).model
    (line,) = second_traces() or [""]
    assert (reason or "") in line
    assert bool(line) == (reason is not None), line
    if reason is None:
        assert fingerprint(graph) == fingerprint(traced_twice(module, monkeypatch))
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 11))
    mask = (np.arange(11) < np.array([[11], [5], [1]])).astype(np.int64)
    (expected,) = module(torch.from_numpy(ids), torch.from_numpy(mask))
    np.testing.assert_allclose(answer(graph, ids, mask), expected.numpy(), rtol=1e-5, atol=1e-5)


_SIZES_OF_ANOTHER_INPUT = ("led", "longformer", "transfo-xl")
"""Two traces read a size from two inputs that both have the size: the mask and the marks, or two memories."""


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [name for name in SUPPORTED_MODEL_TYPES if name not in _SIZES_OF_ANOTHER_INPUT])
def test_the_graph_of_every_family_is_that_of_two_traces_in_full(
    tiny_bundles, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny_bundles(model_type)
    monkeypatch.setattr(hdexport.graph.tracing, "composites_rewritten", contextlib.nullcontext)
    monkeypatch.setattr(hdexport.graph.tracing, "trace", in_full)
    positions = {"max_len": bundle.manifest.max_len, "alpha": ALPHA, "attention_scale": "none"}
    build(BuildOptions(model=bundle.checkpoint, output=tmp_path / "bundle", verify=None, **positions))
    assert fingerprint(bundle.graph) == fingerprint(ir.load(tmp_path / "bundle" / "model.onnx"))
