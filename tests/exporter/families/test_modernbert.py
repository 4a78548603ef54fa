"""ModernBERT's local and global layers answer as Hugging Face's, its rotary positions at any length and precision.

Its tasks are compared in test_families.py, with a classifier that takes the mean of all tokens.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from hdexport.checkpoint import find_checkpoint
from hdexport.cli import main
from hdexport.families import family_of
from hdexport.graph.targets.tensorrt.builder import build_engine
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl, tensorrt_graph
from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options
from hdexport.pipeline import run
from hdruntime.bundle.manifest import Backend, Task
from support.answers import ATOL, assert_answers, assert_as_hugging_face
from support.comparators import assert_close
from support.grids import nightly_unless
from support.needs import needs_rtx
from support.padded_batches import cases
from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, save_tiny_model

# Around the window and its span, the checkpoint's 64 positions, primes, the bundle's longest.
LENGTHS = (1, 2, 7, 8, 9, 10, 16, 17, 37, 64, 65, 131, 300)

# Far from the origin a rounded frequency shows most, in a model of large weights, whose attention looks far.
FAR = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "initializer_range": 0.22, "max_len": 4200}
FAR_TOKENS = 4177


def random_text(tokens: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(tokens).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_local_and_global_layers_answer_as_hugging_face(tiny_bundles) -> None:
    assert_as_hugging_face(tiny_bundles("modernbert"), LENGTHS)


def test_a_decoders_windows_look_back(tiny_bundles, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the window that its configuration says, the token itself counted."""
    bundle = tiny_bundles("modernbert-decoder")
    (record,) = (each for each in bundle.manifest.attention if each["type"] == "window")
    assert (record["layers"], record["right"]) == ([7, 7], 0)
    text = random_text(65)
    changed = text | {"input_ids": text["input_ids"].copy()}
    changed["input_ids"][0, 40] += 1 if text["input_ids"][0, 40] < VOCAB_SIZE - 1 else -1
    before, after = (bundle.session(**each)["last_hidden_state"][0] for each in (text, changed))
    assert_close(after[:40], before[:40], atol=ATOL)
    assert (np.abs(after[40:] - before[40:]).max(axis=1) > 1e-3).all(), "the global layers see it"
    assert main(["inspect", str(bundle.path)]) == 0
    assert "before and after: 7 and 0 in 2 layers" in capsys.readouterr().out


def test_the_keys_of_older_configurations_are_read(tmp_path: Path) -> None:
    """As the published checkpoints have them."""
    save_tiny_model(tmp_path, "modernbert", Task.FEATURE_EXTRACTION, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("layer_types", "rope_parameters")}
    config |= {"global_rope_theta": 700.0, "local_rope_theta": 20.0, "global_attn_every_n_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"position_embedding_type": "absolute"}))
    model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    rope = model.config.rope_parameters
    assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (700.0, 20.0)
    assert model.config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    feeds = {name: torch.from_numpy(array) for name, array in random_text(131).items()}
    with torch.inference_mode():
        expected, got = (each(**feeds).last_hidden_state.numpy() for each in (theirs, model))
    assert_close(got, expected, atol=ATOL)


def test_nothing_outside_the_operators_has_a_value_per_pair_of_tokens(tiny_bundles) -> None:
    graph = tiny_bundles("modernbert").graph.graph
    shapes = {value.name: value.shape for node in graph.all_nodes() for value in node.outputs}
    assert sum(shape is not None and len(shape) == 4 for shape in shapes.values()) > 40
    for name, shape in shapes.items():
        axes = Counter(str(axis) for axis in shape or () if not isinstance(axis, int))
        assert set(axes.values()) <= {1}, (name, shape)
    assert "Softmax" not in {node.op_type for node in graph.all_nodes()}


@pytest.mark.nightly
def test_every_process_writes_the_same_graph(tmp_path: Path) -> None:
    """transformers asks for the tables in the order of a set of strings, which the hash seed decides."""
    save_tiny_model(tmp_path / "model", "modernbert", Task.FEATURE_EXTRACTION)
    hdexport = Path(sys.executable).with_name("hdexport")
    orders, graphs = set(), set()
    for seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        order = "print(list({'full_attention', 'sliding_attention'}))"
        orders.add(subprocess.check_output([sys.executable, "-c", order], env=environment))
        command = [hdexport, "build", "model", "-o", seed, "--max-len", "128", "--target", "onnx", "--verify", "none"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        graphs.add((tmp_path / seed / "model.onnx").read_bytes())
    assert (len(orders), len(graphs)) == (2, 1)


@pytest.mark.parametrize(
    ("model_type", "precision"),
    [
        ("modernbert", "float16"),
        # Their frequencies are kept, and their tables made, by the same code.
        nightly_unless(False, "gte", "float16"),
        nightly_unless(False, "qwen3", "float16"),
        nightly_unless(False, "modernbert", "bfloat16"),
    ],
)
def test_half_precision_is_right_far_from_the_origin(tiny_bundles, model_type: str, precision: str) -> None:
    """Float16 has no 4177, nor most of the other positions that a frequency is multiplied by."""
    bundle = tiny_bundles(model_type, precision=precision, **FAR)
    feeds = random_text(FAR_TOKENS)
    expected = bundle.hugging_face(**feeds)
    rounded = bundle.hugging_face.model.base_model.rotary_emb
    original = dict(rounded.named_buffers())
    for name, frequencies in original.items():
        setattr(rounded, name, frequencies.to(getattr(torch, precision)).float())
    wrong = bundle.hugging_face(**feeds)
    for name, frequencies in original.items():
        setattr(rounded, name, frequencies)
    cosine = {"float16": 0.9999, "bfloat16": 0.999}[precision]
    assert_answers(bundle, feeds, expected, cosine=cosine)
    with pytest.raises(AssertionError, match=r"cosine|lengths"):
        assert_answers(bundle, feeds, wrong, cosine=cosine)


def test_a_classifier_reads_the_first_real_token(traced_models) -> None:
    """As Hugging Face's does where that is the first of all; where padding is, it reads the padding."""
    bundle = traced_models("modernbert", "text-classification", classifier_pooling="cls", num_hidden_layers=1)
    for tokens, name, input_ids, attention_mask in cases((1, 9, 65, 300), sizes=(3,)):
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask}
        if name.startswith("padding on the left"):
            texts = [ids[mask == 1][None] for ids, mask in zip(input_ids, attention_mask, strict=True)]
            logits = [bundle.hugging_face(text, np.ones_like(text))["logits"] for text in texts]
            expected = {"logits": np.concatenate(logits)}
        else:
            attention_mask[:, 0] = 1
            expected = bundle.hugging_face(**feeds)
        assert_answers(bundle, feeds, expected, case=(f"{tokens} tokens", name))


def test_a_classifier_pools_in_float32(tiny_bundles) -> None:
    """No sum over the tokens is ever rounded to float16, which it may not even fit."""
    graph = tiny_bundles("modernbert", "text-classification", "float16").graph.graph
    (mean,) = (node for node in graph if node.op_type == "Div")
    total = mean.inputs[0].producer()
    product = total.inputs[0].producer()
    assert (total.op_type, product.op_type) == ("ReduceSum", "Mul")
    assert {value.dtype for value in (*mean.inputs, *product.inputs)} == {ir.DataType.FLOAT}


@pytest.mark.parametrize(("trained", "warns"), [(299, True), (300, False)])
def test_a_build_warns_of_lengths_beyond_the_training(tiny_bundles, caplog, trained: int, warns: bool) -> None:
    positions = dataclasses.replace(tiny_bundles("modernbert").manifest.positions, base=trained)
    run._warn_of_untrained_positions(positions, family_of("modernbert"))
    assert ("accepts positions 299 to 299, which the model was not trained with" in caplog.text) == warns


@needs_rtx
@pytest.mark.parametrize(
    ("model_type", "impl", "dense", "plugins"),
    [
        ("modernbert", "plugin", 1, {"SlidingWindowAttention": 1}),
        # Windows without a plugin are in test_sparse_engine.py, causal heads in groups in test_lowering_tensorrt.py.
        nightly_unless(False, "modernbert", "native", 1, {}),
        nightly_unless(False, "gte", "native", 2, {}),
        nightly_unless(False, "qwen3", "native", 2, {}),
    ],
)
def test_a_tensorrt_rtx_engine_is_built_of_local_and_global_layers(
    tiny_bundles, tmp_path: Path, model_type: str, impl: str, dense: int, plugins: dict[str, int]
) -> None:
    portable = tiny_bundles(model_type, precision="float16", **FAR).graph
    lowered = tensorrt_graph(portable, dtype="float16", attention_impl=AttentionImpl(impl))
    assert [node.op_type for node in lowered.graph].count("Attention") == dense
    ir.save(lowered, tmp_path / "tensorrt.onnx", external_data="weights", size_threshold_bytes=0)
    engine = build_engine(
        tmp_path / "tensorrt.onnx",
        tmp_path / "model.engine",
        EngineTarget(Backend.TENSORRT_RTX, ("sm89",)),
        bundle=tmp_path,
        profiles=profiles_from_options(FAR["max_len"], profiles="100,4200", batch="1:3:4"),
        precision="float16",
    )
    assert json.loads((tmp_path / engine.metadata).read_text())["plugins"] == plugins
