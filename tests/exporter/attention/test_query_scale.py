"""Bundles with --attention-scale logn answer as an attention in NumPy, whose queries grow with ln n."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

import hdruntime
from hdexport.attention.attention_type import ConversionContext
from hdexport.attention.query_scale import LogScale
from hdexport.attention.reference_attention import use_query_scale
from hdexport.attention.registry import attention_conversions, attention_from_spec
from hdexport.attention.window import Window
from hdexport.attention.window.model import window_mask
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.extended_files import EXTENSION_KEY
from hdexport.engines.build import EngineOptions
from hdexport.families import family_of
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options
from hdexport.rebuild import RebuildOptions, rebuild
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.manifest import Backend, Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputError
from support.answers import ATOL, assert_answers, distance, inputs_of
from support.commands import run_here
from support.comparators import assert_close
from support.every_key import write_manifest_values
from support.grids import nightly_unless
from support.log_scaled import LogScaled, Pairs, bigbird, dense, window
from support.needs import needs_rtx
from support.padded_batches import batches, cases
from support.tiny_models import BASE, VOCAB_SIZE, save_tiny_model
from support.verified import verified

AROUND_BASE = (BASE - 1, BASE, BASE + 1, 2 * BASE)

FEW_KEYS, MANY_KEYS, BLOCKS = "window:16,global:5", "window:40,global:3", "bigbird:block=16,random=3"
"""Windows of 38 keys, fewer than the 64 of training, and of 84; blocks, dense up to 176 tokens and else 80 keys."""

HEADS_OF_32 = {"hidden_size": 128, "initializer_range": 0.1, "num_hidden_layers": 1}
"""The smallest for which there are kernels."""


def test_one_trained_position_is_refused() -> None:
    with pytest.raises(InputError, match=r"number of trained positions, which is 1\.\nUse attention_scale"):
        LogScale(1)


# Answers


ATTENTIONS: dict[str, tuple[str, str | None, Pairs, tuple[int, ...]]] = {
    "dense": ("bert", None, dense, AROUND_BASE),
    "dense layers among windowed ones": ("modernbert", None, dense, AROUND_BASE),
    "positions by what is padding": ("roberta", None, dense, AROUND_BASE),
    "windows of few keys": ("bert", FEW_KEYS, window(16, 5), (37, 38, 39, 65, 131)),
    "windows of many keys": ("bert", MANY_KEYS, window(40, 3), (*AROUND_BASE, 84, 85, 211)),
    "blocks": ("bert", BLOCKS, bigbird(16, 3), (*AROUND_BASE, 176, 177, 211)),
}


def check(model: Any, pairs: Pairs, lengths: tuple[int, ...]) -> None:
    expected = LogScaled(model, pairs)
    for tokens, name, input_ids, attention_mask in cases(lengths):
        feeds = inputs_of(model, input_ids, attention_mask)
        assert_answers(model, feeds, expected(**feeds), case=(f"{tokens} tokens", name))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_is_traced_answers_as_numpy(traced_models, attention: str) -> None:
    model_type, spec, pairs, lengths = ATTENTIONS[attention]
    check(traced_models(model_type, attention=spec, attention_scale="logn"), pairs, lengths)


@pytest.mark.parametrize("attention", [nightly_unless(name == "dense", name) for name in ATTENTIONS])
def test_both_graphs_answer_as_numpy(tiny_bundles, attention: str) -> None:
    model_type, spec, pairs, lengths = ATTENTIONS[attention]
    check(tiny_bundles(model_type, attention=spec, attention_scale="logn"), pairs, lengths)


def test_the_comparison_sees_another_factor(tiny_bundles) -> None:
    bundle = tiny_bundles("bert", attention_scale="logn")
    _, *batch = next(batches(2 * BASE))
    feeds = inputs_of(bundle, *batch)
    got = bundle.session(**feeds)["last_hidden_state"]
    assert distance(got, LogScaled(bundle, dense, base=BASE + 1)(**feeds)["last_hidden_state"]) > 10 * ATOL


@pytest.mark.parametrize("precision", ["float32", nightly_unless(False, "float16")])
def test_texts_of_trained_lengths_keep_every_bit(tiny_bundles, precision: str) -> None:
    """Also beside longer ones, which do not."""
    scaled, plain = (tiny_bundles("bert", precision=precision, attention_scale=scale) for scale in ("logn", "none"))
    for tokens, name, input_ids, attention_mask in cases((1, 63, 64, 96)):
        feeds = inputs_of(plain, input_ids, attention_mask)
        short = attention_mask.sum(1) <= BASE
        for graph in ("portable", "session"):
            got, before = (getattr(bundle, graph)(**feeds)["last_hidden_state"] for bundle in (scaled, plain))
            real = attention_mask == 1
            assert np.array_equal(got[short][real[short]], before[short][real[short]]), (graph, tokens, name)
            assert short.all() or distance(got[~short][real[~short]], before[~short][real[~short]]) > 1e-3


@functools.cache
def a_bert(folder: Path) -> transformers.PreTrainedModel:
    return save_tiny_model(folder, "bert", Task.FEATURE_EXTRACTION, max_position_embeddings=300)


@pytest.fixture
def bert(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedModel:
    """A new tiny BERT that was trained with 300 positions."""
    return copy.deepcopy(a_bert(tmp_path_factory.getbasetemp() / "scaled-bert"))


def states(model: transformers.PreTrainedModel, tokens: int = 200) -> torch.Tensor:
    ids = torch.randint(5, VOCAB_SIZE, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(tokens) < torch.tensor([[tokens], [tokens // 2]])).long()
    return model(input_ids=ids, attention_mask=mask).last_hidden_state[mask == 1]


def test_the_reference_is_a_model_with_larger_query_weights(tmp_path: Path) -> None:
    """For texts of one length, the factor can go into the weights; MPNet's bias on the scores stays as it is."""
    scaled = save_tiny_model(tmp_path, "mpnet", Task.FEATURE_EXTRACTION, max_position_embeddings=300)
    weighted = copy.deepcopy(scaled)
    use_query_scale(scaled, family_of("mpnet"), LogScale(50))
    ids = torch.randint(5, VOCAB_SIZE, (2, 200), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(ids)
    mask[:, 20:150] = 1
    with torch.inference_mode():
        for name, weight in weighted.named_parameters():
            if ".attn.q." in name:
                weight.mul_(float(np.log(130) / np.log(50)))
        got, expected = (
            model(input_ids=ids, attention_mask=mask).last_hidden_state[mask == 1] for model in (scaled, weighted)
        )
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


def test_gradients_are_the_same_with_checkpointing(bert: transformers.PreTrainedModel) -> None:
    """Layers are computed again when the model has been called with other lengths since."""
    use_query_scale(bert, family_of("bert"), LogScale(50))
    bert.config.attention_probs_dropout_prob = 0.0
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    bert.train()
    embeddings = bert.embeddings.word_embeddings.weight
    gradients = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            bert.gradient_checkpointing_enable({"use_reentrant": False})
        bert.zero_grad()
        (states(bert, 200).pow(2).sum() + states(bert, 90).pow(2).sum()).backward()
        gradients.append(embeddings.grad.clone())
    assert gradients[0].abs().max() > 0.01
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)


# Verification


@pytest.mark.parametrize(
    ("model_type", "precision", "spec"),
    [
        nightly_unless(False, "bert", "float32", None),
        nightly_unless(False, "mpnet", "float32", None),
        nightly_unless(False, "modernbert", "float16", None),
        nightly_unless(False, "bert", "float32", MANY_KEYS),
        nightly_unless(False, "bert", "float16", BLOCKS),
        nightly_unless(False, "bert", "float32", "etc:global=6,block=32,tokens=3"),
    ],
)
def test_the_full_grid_is_verified(tiny_bundles, model_type: str, precision: str, spec: str | None) -> None:
    bundle = tiny_bundles(model_type, precision=precision, attention=spec, attention_scale="logn")
    found = verified(bundle, grid=Grid.FULL)
    assert found.passed, found.failed
    assert {BASE + 1, 2 * BASE, 300} <= {check.case.tokens for check in found.checks}


@pytest.mark.parametrize(("said", "does"), [("logn", "none"), ("none", "logn")])
def test_verification_sees_a_graph_that_scales_otherwise_than_the_manifest_says(
    tiny_bundles, said: str, does: str
) -> None:
    bundle = tiny_bundles("bert", attention_scale=does)
    manifest = bundle.manifest
    wrong = dataclasses.replace(manifest, positions=dataclasses.replace(manifest.positions, attention_scale=said))
    opened = Bundle(bundle.path, wrong)
    found = verify_bundle(opened, reference_of(opened, find_checkpoint(bundle.checkpoint)), grid=Grid.QUICK)
    assert not found.passed
    for check in found.checks:
        assert check.passed == (max(check.case.lengths) <= BASE), check


def test_a_table_that_was_extended_before_is_verified_around_the_trained_positions(tmp_path: Path) -> None:
    """Where queries begin to be scaled; the checkpoint's own record says where that is."""
    save_tiny_model(
        tmp_path / "model",
        "bert",
        Task.FEATURE_EXTRACTION,
        max_position_embeddings=300,
        **{EXTENSION_KEY: {"base": BASE, "scheme": "tile"}},
    )
    options = {"model": tmp_path / "model", "output": tmp_path / "bundle", "max_len": 300}
    manifest = build(BuildOptions(**options, attention_scale="logn", verify=None))
    assert (manifest.positions.base, manifest.positions.trained) == (300, BASE)
    opened = open_bundle(tmp_path / "bundle")
    reference = reference_of(opened, find_checkpoint(tmp_path / "model"))
    found = verify_bundle(opened, reference, grid=Grid.QUICK)
    assert found.passed, found.failed
    assert {65, 66, 128} <= {length for check in found.checks for length in check.case.lengths}
    expected = LogScaled(SimpleNamespace(checkpoint=tmp_path / "model", manifest=manifest), dense)
    ids = np.random.default_rng(0).integers(5, VOCAB_SIZE, (2, 100))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    with hdruntime.load(tmp_path / "bundle", backend="onnxruntime", threads=1) as session:
        got = session(**feeds)["last_hidden_state"]
    assert_close(got, expected(**feeds)["last_hidden_state"], atol=ATOL)


# Graphs


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


def test_nothing_is_transposed_that_was_not_before(tiny_bundles) -> None:
    """And one product for each layer takes what was computed once."""
    scaled, plain = (tiny_bundles("bert", attention_scale=scale) for scale in ("logn", "none"))
    got, before = operators(scaled.cpu_graph), operators(plain.cpu_graph)
    for name in ("Transpose", "MultiHeadAttention", "If", "Softmax"):
        assert got[name] == before[name], name
    assert (got["Log"] - before["Log"], got["Mul"] - before["Mul"]) == (1, 1 + 2)


def test_queries_that_see_no_more_keys_than_were_trained_have_no_factor(tiny_bundles) -> None:
    mask, scale = torch.ones(1, 300, dtype=torch.bool), LogScale(BASE)
    without = window_mask(Window(tokens=16, global_tokens=0, dilation=(1,)), mask, scale)
    assert (without.query_scale, without.global_scale) == (None, None)
    with_global = window_mask(Window(tokens=16, global_tokens=5, dilation=(1,)), mask, scale)
    assert with_global.query_scale is None
    assert with_global.global_scale is not None
    positions = tiny_bundles("bert", attention_scale="logn").manifest.positions
    assert LogScale.of_positions(positions) == scale
    assert LogScale.of_positions(dataclasses.replace(positions, rows=BASE)) is None


def test_a_window_that_leaves_queries_as_they_are_is_warned_of(
    bert: transformers.PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    context = ConversionContext(
        model=bert,
        family=family_of("bert"),
        task=Task.FEATURE_EXTRACTION,
        max_len=300,
        query_scale=LogScale(BASE),
        asks_for_scale=True,
    )
    said = "changes no query that attends to at most 33 tokens: the model was trained with 64."
    for spec, warns in (("window:16,global:0", True), ("window:40,global:0", False)):
        caplog.clear()
        attention_conversions(attention_from_spec(spec), context)
        assert (said in caplog.text) == warns, spec


@needs_rtx
@pytest.mark.parametrize("precision", [nightly_unless(False, "float32"), "float16"])
def test_an_engine_is_built_from_it_and_rebuilt(tiny_bundles, tmp_path: Path, precision: str) -> None:
    bundle = tiny_bundles("bert", precision=precision, attention_scale="logn", **HEADS_OF_32)
    profiles = profiles_from_options(300, profiles="50,300", batch="1:3:8")
    engines = EngineOptions(variants=(Backend.TENSORRT_RTX,), profiles=profiles, architectures=("sm86",))
    manifest = rebuild(RebuildOptions(bundle=bundle.path, output=tmp_path / "rebuilt", engines=engines))
    assert manifest.positions == bundle.manifest.positions
    assert manifest.positions.attention_scale == "logn"
    (engine,) = manifest.engines
    assert engine.profiles == profiles
    assert (tmp_path / "rebuilt" / engine.file).stat().st_size > 10_000


# The command line


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("big_bird", {}, "blocks of this big_bird have a fixed size at every length.\n"),
        (
            "big_bird",
            {"attention_type": "original_full"},
            "logn cannot scale the queries of a big_bird with dense attention.",
        ),
    ],
)
def test_families_of_own_attention_are_refused(tmp_path: Path, model_type: str, changes: dict, said: str) -> None:
    save_tiny_model(tmp_path / "model", model_type, Task.FEATURE_EXTRACTION, **changes)
    output = tmp_path / "bundle"
    refused = run_here("build", tmp_path / "model", "--max-len", 300, "--attention-scale", "logn", "-o", output)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert "\nUse --attention-scale none." in refused.stderr
    assert not output.exists()


def test_a_bundle_of_before_says_none(tiny_bundles, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_bundles("bert").path, tmp_path / "bundle"))
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("attention_scale", "rope_factor"):
        manifest["positions"].pop(name, None)
    write_manifest_values(path, manifest)
    positions = open_bundle(path).manifest.positions
    assert (positions.attention_scale, positions.rope_factor) == ("none", None)
