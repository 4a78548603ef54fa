"""Qwen3: causal attention without a cache, and what its classifier reads; with EuroBERT, which shares keys as well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.cli.flags import flag
from hdruntime.bundle.manifest import Task
from hdruntime.errors import InputError, write
from support.answers import ATOL
from support.comparators import assert_close
from support.grids import nightly_unless
from support.needs import needs_openvino
from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, change_json, save_tiny_model
from support.verified import verified


def text_of(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, tokens))


@needs_openvino
@pytest.mark.parametrize("model_type", ["qwen3", nightly_unless(False, "eurobert")])
def test_openvino_answers_as_pytorch_in_every_precision(openvino_bundles, model_type: str) -> None:
    bundle = openvino_bundles(model_type)
    found = verified(bundle)
    assert found.passed
    assert {check.case.padding for check in found.checks if check.graph.startswith("openvino")} == {
        "none",
        "right",
        "left",
    }


def test_a_token_changes_nothing_before_it(tiny_bundles) -> None:
    bundle, changed = tiny_bundles("qwen3"), text_of(129)
    changed[0, 100] = PAD_TOKEN_ID + 1 + (changed[0, 100] - PAD_TOKEN_ID) % (VOCAB_SIZE - PAD_TOKEN_ID - 1)
    before, after = (bundle.session(input_ids=ids)["last_hidden_state"][0] for ids in (text_of(129), changed))
    assert_close(after[:100], before[:100], atol=ATOL)
    assert (np.abs(after[100:] - before[100:]).max(axis=1) > 1e-3).all()


def test_there_is_no_cache(tiny_bundles) -> None:
    bundle = tiny_bundles("qwen3")
    assert [spec.name for spec in bundle.manifest.inputs] == ["input_ids", "attention_mask"]
    assert [spec.name for spec in bundle.manifest.outputs] == ["last_hidden_state"]
    nodes = [node for node in bundle.cpu_graph.graph.all_nodes() if node.op_type == "GroupQueryAttention"]
    assert len(nodes) == 4, "two layers, with and without padding"
    assert all(node.inputs[3] is None and node.inputs[4] is None for node in nodes)
    attributes = [node.attributes for node in bundle.graph.graph if node.domain == "hdexport"]
    assert [each["causal"].as_int() for each in attributes] == [1, 1]


def test_nothing_is_quadratic_in_the_graph_for_a_cpu(tiny_bundles) -> None:
    counts = Counter(node.op_type for node in tiny_bundles("qwen3").cpu_graph.graph.all_nodes())
    assert not {"Softmax", "MultiHeadAttention", "Trilu"} & set(counts)


def test_a_classifier_reads_the_last_token_that_is_not_the_padding_s_as_hugging_face(tiny_bundles) -> None:
    """Texts of Qwen3-Embedding end with the id of padding, and the mask says that it is real."""
    bundle, ids = tiny_bundles("qwen3", "text-classification"), text_of(65)
    ids[0, 60:] = PAD_TOKEN_ID
    expected = bundle.hugging_face(ids, np.ones_like(ids))["logits"]
    assert_close(bundle.session(input_ids=ids)["logits"], expected, atol=ATOL)
    other = bundle.hugging_face(ids[:, :50], np.ones_like(ids[:, :50]))["logits"]
    assert np.abs(expected - other).max() > 0.01


def test_a_generator_s_checkpoint_is_an_encoder_without_its_head(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: with the names of the model alone, or with those of the generator."""
    model = save_tiny_model(tmp_path / "model", "qwen3", Task.FEATURE_EXTRACTION)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    head = {"lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}
    save_file(
        {f"model.{name}": weight for name, weight in weights.items()} | head, tmp_path / "model/model.safetensors"
    )
    change_json(tmp_path / "model" / "config.json", architectures=["Qwen3ForCausalLM"])
    checkpoint = find_checkpoint(tmp_path / "model")
    assert checkpoint.task() is Task.FEATURE_EXTRACTION
    assert checkpoint.task_remark is not None
    assert write(checkpoint.task_remark, flag) == (
        "Task: feature-extraction, token embeddings. config.json names Qwen3ForCausalLM, whose head is left out, and "
        "there is no modules.json, which would hold the pooling of an embedding model. Name another task with --task."
    )
    loaded = checkpoint.load(Task.FEATURE_EXTRACTION)
    assert isinstance(loaded, transformers.Qwen3Model)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_what_causal_attention_cannot_have_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3", Task.FEATURE_EXTRACTION)
    with pytest.raises(InputError, match=r"'logn' does not fit this qwen3\. Its tokens .*\n.*attention_scale='none'"):
        build(BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", max_len=128, attention_scale="logn"))
    assert not (tmp_path / "bundle").exists()
