"""Adapters beside a checkpoint: merged into its weights as PEFT would, and refused where that is not known to be right.

The comparison is with what a low-rank adapter is defined to compute.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.adapters import adapters_of
from hdexport.support.progress import Progress
from hdexport.verify import verify_bundle
from hdexport.verify.grid import Grid
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import ExportError, InputError, ModelError, write
from support.commands import run_here
from support.comparators import assert_close
from support.hugging_face import HuggingFace
from support.tiny_models import change_json, save_tiny_model

RANK, ALPHA = 3, 2
TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.fc2")
NAMES = ("classification", "retrieval_passage")
"""Folders; jina-embeddings-v3 calls the second retrieval.passage."""


def save_adapter(folder: Path, model: torch.nn.Module, prefix: str = "", **config: Any) -> None:
    """Write random factors for some modules of both layers, and for the embeddings of words, as PEFT does."""
    generator = torch.Generator().manual_seed(len(folder.name))
    names = [f"layers.{layer}.{target}" for layer in (0, 1) for target in TARGETS]
    factors: dict[str, torch.Tensor] = {}
    for name in names:
        rows, columns = model.base_model.get_submodule(name).weight.shape
        factors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / 4
        factors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 4
    words, width = model.base_model.embeddings.word_embeddings.weight.shape
    factors["embeddings.word_embeddings.lora_embedding_A"] = torch.randn(RANK, words, generator=generator) / 4
    factors["embeddings.word_embeddings.lora_embedding_B"] = torch.randn(width, RANK, generator=generator) / 4
    folder.mkdir()
    save_file(
        {f"base_model.model.{prefix}{name}": weight for name, weight in factors.items()},
        folder / "adapter_model.safetensors",
    )
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": [*TARGETS]}
    change_json(folder / "adapter_config.json", **values, **config)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "model"
    model = save_tiny_model(path, "jina_embeddings_v3", Task.FEATURE_EXTRACTION)
    for name in NAMES:
        save_adapter(path / name, model)
    return path


def with_added_paths(model: Any, folder: Path, scale: float, prefix: str = "") -> None:
    """Make modules add what an adapter adds to their outputs, beside their weights, in place: the definition."""
    factors = load_file(folder / "adapter_model.safetensors")
    for name in {key.rpartition(".lora_")[0] for key in factors}:
        module = model.base_model.get_submodule(name.removeprefix(f"base_model.model.{prefix}"))
        if isinstance(module, torch.nn.Embedding):
            first, second = (factors[f"{name}.lora_embedding_{factor}"] for factor in "AB")

            def added(given: torch.Tensor, first: torch.Tensor = first, second: torch.Tensor = second) -> torch.Tensor:
                return first.T[given] @ second.T
        else:
            first, second = (factors[f"{name}.lora_{factor}.weight"] for factor in "AB")

            def added(given: torch.Tensor, first: torch.Tensor = first, second: torch.Tensor = second) -> torch.Tensor:
                return given @ first.T @ second.T

        module.register_forward_hook(lambda _, given, out, added=added: out + scale * added(given[0]))


def answers(model: Any) -> np.ndarray:
    ids = torch.randint(5, 100, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids))[0].numpy()


@pytest.mark.parametrize(
    ("task", "prefix", "config", "scale"),
    [
        (Task.FEATURE_EXTRACTION, "", {}, ALPHA / RANK),
        (Task.FEATURE_EXTRACTION, "", {"use_rslora": True}, ALPHA / math.sqrt(RANK)),
        (Task.FEATURE_EXTRACTION, "", {"alpha_pattern": {"[a-z0-9_]+": 5, "q_proj": 9}}, 5 / RANK),
        # Made for the encoder, and for the model with the head.
        (Task.TOKEN_CLASSIFICATION, "", {}, ALPHA / RANK),
        (Task.TOKEN_CLASSIFICATION, "roberta.", {}, ALPHA / RANK),
    ],
)
def test_a_merged_adapter_is_what_it_adds(
    tmp_path: Path, task: Task, prefix: str, config: dict[str, Any], scale: float
) -> None:
    model = save_tiny_model(tmp_path, "jina_embeddings_v3", task)
    before = answers(model)
    save_adapter(tmp_path / "retrieval_passage", model, prefix, **config)
    merged = answers(find_checkpoint(tmp_path).with_adapter("retrieval.passage").load(task))
    with_added_paths(model, tmp_path / "retrieval_passage", scale, prefix)
    assert_close(merged, answers(model), atol=5e-5)
    assert np.abs(merged - before).max() > 0.1


def test_a_bundle_answers_with_the_adapter_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    built = run_here(
        *("build", checkpoint, "--adapter", "retrieval.passage", "--max-len", 70, "--target", "onnx"),
        *("-o", tmp_path / "passage"),
    )
    assert built.returncode == 0, built.stderr
    assert "No adapter is merged" not in built.stderr
    bundle = open_bundle(tmp_path / "passage")
    assert bundle.manifest.adapter == "retrieval_passage"
    assert "retrieval_passage, in the weights" in run_here("inspect", bundle.path).stdout
    theirs = HuggingFace(checkpoint, "feature-extraction", max_len=70)
    with_added_paths(theirs.model, checkpoint / "retrieval_passage", ALPHA / RANK)
    reference = reference_of(bundle, find_checkpoint(checkpoint))
    ids = np.random.default_rng(0).integers(5, 100, (1, 70))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    assert_close(reference.batch(feeds)["last_hidden_state"], theirs(**feeds)["last_hidden_state"], atol=5e-5)
    for other in ("classification", None):
        wrong = Bundle(bundle.path, dataclasses.replace(bundle.manifest, adapter=other))
        assert identity_of_bundle(wrong.manifest) != identity_of_bundle(bundle.manifest)
        assert not verify_bundle(wrong, reference_of(wrong, find_checkpoint(checkpoint)), grid=Grid.QUICK).passed


def plain_words(checkpoint: Path) -> torch.Tensor:
    """The embeddings of words as they are stored, which an adapter changes."""
    return load_file(checkpoint / "model.safetensors")["embeddings.word_embeddings.weight"]


def test_without_a_name_none_is_merged_and_the_build_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    traced: list[Any] = []

    def stop(module: Any, *_: object, **__: object) -> None:
        traced.append(module)
        raise ExportError("the trace begins")

    class Told(Progress):
        def result(self, line: str) -> None:
            lines.append(line)

    monkeypatch.setattr("hdexport.graph.tracing.trace", stop)
    with pytest.raises(ExportError, match="the trace begins"):
        build(BuildOptions(model=checkpoint, output=tmp_path / "plain", max_len=70), Told())
    assert torch.equal(traced[0].model.embeddings.word_embeddings.weight, plain_words(checkpoint))
    said = "No adapter is merged, as transformers loads none by itself; adapter takes one of"
    assert f"{said} classification, retrieval_passage." in map(write, lines)


def test_an_unknown_adapter_is_refused_with_those_there_are(checkpoint: Path, tmp_path: Path) -> None:
    assert adapters_of(checkpoint) == NAMES
    refused = run_here("build", checkpoint, "--adapter", "separation", "-o", tmp_path / "bundle")
    assert refused.returncode == 1
    assert "--adapter separation is not among the adapters of" in refused.stderr
    assert "Choose from: classification, retrieval_passage." in refused.stderr
    save_tiny_model(tmp_path / "bert", "bert", Task.FEATURE_EXTRACTION)
    with pytest.raises(InputError, match=r"adapter='x' names an adapter, and .* has none: .*\nLeave adapter out\."):
        find_checkpoint(tmp_path / "bert").with_adapter("x")


def config_with(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "adapter_config.json", **values)


def weights_with(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        change(weights)
        save_file(weights, folder / "adapter_model.safetensors")

    return changed


NAME = "base_model.model.layers.0.mlp.fc2.lora_A.weight"
REFUSED = {
    "not low-rank": (config_with(peft_type="IA3"), "has peft_type 'IA3'; LORA fits"),
    "that began elsewhere": (config_with(init_lora_weights="pissa"), "has 'init_lora_weights' 'pissa'"),
    "of a later kind": (config_with(use_new_idea={"a": 1}), "has 'use_new_idea' {'a': 1}, which is not supported"),
    "of another rank": (config_with(r=8), "r 8 for '.*', whose factors have rank 3"),
    "of another model": (
        weights_with(lambda weights: weights.update({NAME.replace("fc2", "fc3"): weights[NAME].clone()})),
        "changes 'layers.0.mlp.fc3', which a JinaEmbeddingsV3Model does not have",
    ),
    "of another shape": (
        weights_with(lambda weights: weights.update({NAME: torch.zeros(RANK, 5)})),
        "the factors of 'layers.0.mlp.fc2' are \\[32, 3\\] and \\[3, 5\\], and its weight is \\[32, 48\\]",
    ),
    "with more than factors": (
        weights_with(lambda weights: weights.update({"base_model.model.pooler.dense.bias": torch.zeros(32)})),
        "holds 'pooler.dense.bias', which is no finite factor of a low-rank change, nor",
    ),
    "not finite": (weights_with(lambda weights: weights[NAME].fill_(math.nan)), "is no finite factor"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_known_to_be_right_is_refused(tmp_path: Path, change: Callable[[Path], None], said: str) -> None:
    model = save_tiny_model(tmp_path, "jina_embeddings_v3", Task.FEATURE_EXTRACTION)
    save_adapter(tmp_path / "retrieval_passage", model)
    change(tmp_path / "retrieval_passage")
    with pytest.raises(ModelError, match=said):
        find_checkpoint(tmp_path).with_adapter("retrieval.passage").load(Task.FEATURE_EXTRACTION)
