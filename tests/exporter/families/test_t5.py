"""T5's encoder: numbers by distance, encoders with and without a decoder, and states that float16 cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hdexport.attention.interface import use_operators
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.families import family_of, t5
from hdexport.model.half_precision import RootMeanSquareNorm, cast_model
from hdexport.model.surgery import fuse_gelu
from hdruntime.bundle.manifest import Dtype, Task
from hdruntime.errors import ModelError
from support.answers import assert_as_hugging_face
from support.comparators import assert_close, assert_same_directions
from support.padded_batches import batches
from support.tampered_bundles import tampered
from support.tiny_models import save_tiny_model
from support.verified import verified

REACH = 20
"""Of the tiny T5."""

MODELS = {"t5": transformers.T5ForConditionalGeneration, "umt5": transformers.UMT5ForConditionalGeneration}


def test_every_length_around_the_reach_answers_as_hugging_face(tiny_bundles) -> None:
    lengths = (REACH - 1, REACH, REACH + 1, REACH + 2, 2 * REACH, 2 * REACH + 1, 2 * REACH + 2)
    assert_as_hugging_face(tiny_bundles("t5"), lengths, sizes=(1, 3))


@pytest.mark.parametrize("model_type", ["t5", "umt5"])
def test_the_table_has_the_number_of_every_distance(model_type: str) -> None:
    attention, config_class = {
        "t5": (transformers.models.t5.modeling_t5.T5Attention, transformers.T5Config),
        "umt5": (transformers.models.umt5.modeling_umt5.UMT5Attention, transformers.UMT5Config),
    }[model_type]
    for buckets, reach in ((4, 2), (5, 2), (8, 3), (32, 128), (32, 9), (64, 130), (320, 81)):
        sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": reach}
        config = config_class(d_model=4, d_kv=2, num_heads=3, d_ff=4, vocab_size=5, **sizes)
        module = attention(config, has_relative_attention_bias=True)
        table = t5._scores_by_distance(module)
        assert table.shape == (1, 1, 3, 2 * reach + 1)
        tokens = 3 * reach + 5
        places = torch.arange(tokens)
        rows = (places[None] - places[:, None]).clamp(-reach, reach) + reach
        expected = module.compute_bias(tokens, tokens)[0]
        assert torch.equal(table[0, 0][:, rows], expected), (buckets, reach)


@pytest.mark.parametrize(("buckets", "reach"), [(3, 128), (32, 8)])
def test_buckets_of_no_distances_are_refused(buckets: int, reach: int, tmp_path: Path) -> None:
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": reach}
    save_tiny_model(tmp_path / "model", "t5", Task.FEATURE_EXTRACTION, **sizes)
    with pytest.raises(
        ModelError, match=rf"num_buckets {buckets} and relative_attention_max_distance {reach}; 4 .*\nSet"
    ):
        build(BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", max_len=64, verify=None))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("model_type", ["t5", "umt5"])
def test_the_encoder_of_a_whole_model_is_loaded_and_its_decoder_left_out(model_type: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    alone = find_checkpoint(tmp_path)
    lines: list[str] = []
    alone.load(Task.FEATURE_EXTRACTION, report=lines.append)
    assert lines == []
    whole = MODELS[model_type](transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    whole.save_pretrained(tmp_path)
    model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION, report=lines.append)
    (line,) = lines
    assert line.startswith("Left out of the bundle, because feature-extraction does not use them: decoder (")
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).last_hidden_state, whole.encoder(ids).last_hidden_state)


def test_tables_are_stored_once_where_layers_share_them(tiny_bundles) -> None:
    def tables(model_type: str) -> list[list[Any]]:
        graph = tiny_bundles(model_type).graph.graph
        return [list(node.inputs) for node in graph if node.op_type == "ClippedDistanceAttention"]

    for model_type, names in (("t5", 1), ("umt5", 2)):
        assert len({inputs[4].name for inputs in tables(model_type)}) == names
        assert all(inputs[4].is_initializer() for inputs in tables(model_type))


# Wrong answers


def _shift(model: ir.Model) -> None:
    """Every distance has the number of the one before it."""
    for value in {node.inputs[4] for node in model.graph if node.op_type == "ClippedDistanceAttention"}:
        value.const_value = ir.tensor(np.roll(value.const_value.numpy(), 1, axis=-1))


def test_a_wrong_table_is_found(tiny_bundles, tmp_path) -> None:
    bundle = tiny_bundles("t5")
    assert not verified(bundle, tampered(bundle, tmp_path / "wrong", _shift, "model.onnx")).passed
    assert verified(bundle).passed


# Half precision


def _with_large_states(path: Path, model_type: str, factor: float = 60_000.0) -> Path:
    """A checkpoint whose networks make states beyond 65504; the norms after them undo that."""
    save_tiny_model(path, model_type, Task.FEATURE_EXTRACTION)
    weights = load_file(path / "model.safetensors")
    weights = {name: weight * (factor if name.endswith(".wo.weight") else 1) for name, weight in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _in_half(path: Path, model_type: str, precision: Dtype) -> Any:
    """The model as it is traced, all of whose products PyTorch rounds to half precision."""
    family, model = family_of(model_type), find_checkpoint(path).load(Task.FEATURE_EXTRACTION)
    cast_model(model, precision)
    fuse_gelu(model)
    family.adapt(model)
    use_operators(model)
    return model


def test_states_beyond_float16_are_right(tmp_path: Path) -> None:
    model_type = "t5"
    path = _with_large_states(tmp_path, model_type)
    original = find_checkpoint(path).load(Task.FEATURE_EXTRACTION)
    largest = []
    for layer in original.encoder.block:
        layer.register_forward_hook(lambda _, __, output: largest.append(float(output[0].abs().max())))
    _, input_ids, mask = next(batch for batch in batches(43) if batch[0] == "padding on the left, batch 3")
    feeds = {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}
    with torch.inference_mode():
        expected = original(**feeds).last_hidden_state.numpy()
        found = _in_half(path, model_type, "float16")(**feeds).last_hidden_state
        cast = original.half()(**feeds).last_hidden_state.float().numpy()
    assert max(largest) > 65504
    assert found.dtype is torch.float16
    assert_same_directions(found.float().numpy()[mask == 1], expected[mask == 1], cosine=0.999)
    # The library's model clamps what is infinite, or makes NaN of it.
    with pytest.raises(AssertionError):
        assert_same_directions(cast[mask == 1], expected[mask == 1], cosine=0.999)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_text_of_padding_alone_is_finite_in_half_precision(precision: Dtype, tmp_path: Path) -> None:
    model = _in_half(_with_large_states(tmp_path, "umt5"), "umt5", precision)
    ids, mask = torch.arange(46).reshape(2, 23), torch.ones(2, 23, dtype=torch.int64)
    mask[0] = 0
    with torch.inference_mode():
        both = model(input_ids=ids, attention_mask=mask).last_hidden_state
        alone = model(input_ids=ids[1:], attention_mask=mask[1:]).last_hidden_state
    assert both.dtype is getattr(torch, precision)
    assert both.isfinite().all()
    assert_close(both[1:].float().numpy(), alone.float().numpy(), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_are_the_librarys_in_float32(dtype: torch.dtype) -> None:
    original = transformers.models.t5.modeling_t5.T5LayerNorm(6, eps=1e-3)
    with torch.no_grad():
        original.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(0))
    states = (torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)) * 1e4).to(dtype)
    states[0, 0] = 0
    found = RootMeanSquareNorm(original)(states)
    assert found.dtype is dtype
    torch.testing.assert_close(
        found, original(states.float()).to(dtype), atol=1e-6, rtol=1e-6 if dtype is torch.float32 else 4e-3
    )
    holder = torch.nn.ModuleList([original, torch.nn.Linear(6, 6)])
    cast_model(holder, "float16")
    assert isinstance(holder[0], RootMeanSquareNorm)
    assert {holder[0].weight.dtype, holder[1].weight.dtype} == {torch.float32, torch.float16}


# ONNX Runtime


def test_onnx_runtime_makes_one_operator_of_a_norm(tiny_bundles, tmp_path: Path) -> None:
    import onnxruntime

    bundle = tiny_bundles("t5")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(bundle.path / "onnxruntime_cpu.onnx", options)
    names = [node.op_type for node in ir.load(tmp_path / "optimised.onnx").graph]
    assert sum(name in ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization") for name in names) == 5
    assert "Pow" not in names
