"""Rerankers whose head is a chain of sentence-transformers' modules: the numbers of that library."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hdruntime
from hdruntime import CrossEncoder
from hdruntime.errors import InputError
from support.commands import run_here
from support.comparators import assert_close
from support.grids import nightly_unless
from support.made_once import made_once

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 1e-5
"""Measured: 5e-7."""

POSITIONS, MAX_LEN = 64, 90
WORDS = ["museums", "river", "bridge", "people", "city", "train", "garden", "market"]
LENGTHS = (0, 1, POSITIONS - 5, POSITIONS - 4, POSITIONS - 3, MAX_LEN - 5, MAX_LEN - 4, MAX_LEN - 3, 150)
"""Words of a document, each of which is a token; with a query of one and three special tokens."""

DOCUMENTS = [" ".join(WORDS[place % 7] for place in range(length)) for length in LENGTHS]
PAIRS = [*(("Spree", document) for document in DOCUMENTS), (DOCUMENTS[-1], DOCUMENTS[-1]), ("", "")]


def _model(model_type: str, vocab_size: int) -> Any:
    """A small encoder with random weights."""
    from transformers import AutoConfig, AutoModel

    options: dict[str, Any] = {
        "modernbert": {"local_attention": 16, "cls_token_id": 101, "sep_token_id": 102},
        # Positions begin after the padding's row.
        "longformer": {"attention_window": [16, 16], "max_position_embeddings": POSITIONS + 1},
        "bert": {},
    }[model_type]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = AutoConfig.for_model(
        model_type,
        **{"vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102, **sizes},
        **{"max_position_embeddings": POSITIONS, "initializer_range": 0.4, **options},
    )
    return AutoModel.from_config(config)


def _modules(name: str) -> tuple[list[Any], dict[str, Any]]:
    """The modules after a Transformer, and settings of the CrossEncoder."""
    import torch
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
    from torch.nn import GELU, Identity, SiLU, Softmax, Tanh

    def dense(*sizes: int, activation: Any, **options: Any) -> Dense:
        return Dense(*sizes, activation_function=activation, **options)

    scores = {"module_output_name": "scores"}
    if name == "bert":
        return [
            Pooling(32, ("mean", "max", "lasttoken"), include_prompt=False),
            dense(96, 24, activation=SiLU(), use_residual=True),
            Dropout(0.5),
            Normalize(),
            dense(24, 24, activation=GELU(), use_residual=True),
            dense(24, 3, activation=Tanh(), **scores),
        ], {"activation_fn": Softmax(-1), "prompts": {"query": "Find it: "}, "default_prompt_name": "query"}
    norm = LayerNorm(32)
    torch.nn.init.normal_(norm.norm.weight)
    torch.nn.init.normal_(norm.norm.bias)
    return [
        Pooling(32, "cls" if name == "modernbert" else "weightedmean"),
        dense(32, 32, activation=GELU(), bias=False),
        norm,
        dense(32, 1, activation=Identity(), **scores),
    ], {"prompts": {"query": "Find it: "}}


def _save(path: Path, name: str) -> None:
    import torch
    from sentence_transformers.base.modules import Transformer
    from transformers import AutoTokenizer

    from hdexport.checkpoint import default_model

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(str(default_model()[0]), model_max_length=POSITIONS)
    if name != "bert":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    base = path.with_name("base")
    _model(name, len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    modules, options = _modules(name)
    encoder = sentence_transformers.CrossEncoder(modules=[Transformer(str(base)), *modules], device="cpu", **options)
    encoder.save_pretrained(str(path))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a checkpoint -> a folder with it as ``checkpoint``, and with its ``bundle``."""

    def save_and_build(name: str) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            from hdexport.build import BuildOptions, build

            _save(directory / "checkpoint", name)
            build(
                BuildOptions(model=directory / "checkpoint", output=directory / "bundle", max_len=MAX_LEN, verify=None)
            )

        return make

    return lambda name: made_once(tmp_path_factory, f"modules {name}", save_and_build(name))


def in_sentence_transformers(directory: Path) -> Any:
    return sentence_transformers.CrossEncoder(str(directory / "checkpoint"), device="cpu")


@pytest.mark.pinned  # ranks scores that are almost equal
@pytest.mark.parametrize("name", ["modernbert", "bert", nightly_unless(False, "longformer")])
def test_scores_are_those_of_sentence_transformers(saved: Callable[[str], Path], name: str) -> None:
    import torch

    theirs = in_sentence_transformers(saved(name))
    with CrossEncoder(saved(name) / "bundle", max_length="model", backend="onnxruntime") as ours:
        assert (ours.num_labels, ours.max_seq_length) == (theirs.num_labels, theirs.max_seq_length)
        logits, prompted = {"activation_fn": torch.nn.Identity()}, {"prompt_name": "query", "batch_size": 3}
        for options in ({}, logits, prompted, {"prompt": "", "batch_size": 1}):
            assert_close(ours.predict(PAIRS, **options), theirs.predict(PAIRS, **options), atol=ATOL)
        with pytest.raises(AssertionError):
            assert_close(ours.predict(PAIRS), theirs.predict(PAIRS[::-1]), atol=100 * ATOL)
    with hdruntime.load(saved(name) / "bundle", backend="onnxruntime") as session:
        marks = [spec.default.fill.value for spec in session.manifest.inputs if spec.name == "global_attention_mask"]
        assert marks == (["zeros"] if name == "longformer" else []), "the library's Longformer has no global tokens"
        if theirs.num_labels == 1:
            ranked = session.rank("Spree", DOCUMENTS[:4], overflow="truncate")
            expected = theirs.rank("Spree", DOCUMENTS[:4])
            assert [each["corpus_id"] for each in ranked] == [each["corpus_id"] for each in expected]


def test_longer_pairs_are_read_as_sentence_transformers_reads_them_where_it_can(saved: Callable[[str], Path]) -> None:
    theirs = in_sentence_transformers(saved("modernbert"))
    before, theirs.max_seq_length = theirs.predict(PAIRS), MAX_LEN
    with CrossEncoder(saved("modernbert") / "bundle", max_length=MAX_LEN, backend="onnxruntime") as ours:
        assert_close(ours.predict(PAIRS), theirs.predict(PAIRS), atol=ATOL)
        with pytest.raises(AssertionError):
            assert_close(ours.predict(PAIRS), before, atol=100 * ATOL)


@pytest.mark.nightly
def test_the_bundle_is_verified_in_int8_and_with_no_other_head(saved: Callable[[str], Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    shutil.copytree(saved("bert") / "checkpoint", checkpoint)
    built = run_here("build", checkpoint, "--int8", "--target", "onnx", "--max-len", MAX_LEN, "-o", bundle)
    assert built.returncode == 0, built.stderr
    assert "FAIL " not in built.stdout + built.stderr
    described = run_here("inspect", bundle).stdout
    assert "reads pairs of texts, pools mean and max and lasttoken, scores by softmax" in described
    assert "prompt tokens are not pooled" in described
    assert run_here("verify", bundle, "--model", checkpoint).returncode == 0
    weights = load_file(checkpoint / "6_Dense" / "model.safetensors")
    save_file({**weights, "linear.bias": torch.ones(3)}, checkpoint / "6_Dense" / "model.safetensors")
    assert run_here("verify", bundle, "--model", checkpoint).returncode == 1


def test_a_memory_is_refused_as_all_tokens_of_a_pair_are_pooled(saved: Callable[[str], Path], tmp_path: Path) -> None:
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions, build

    options = {"attention": attention_from_spec("window:8,right:0,global:0"), "recurrence": 8, "verify": None}
    with pytest.raises(InputError, match=r"pooled of all tokens of a pair(.|\n)*Leave recurrence out"):
        build(BuildOptions(model=saved("bert") / "checkpoint", output=tmp_path / "b", max_len=MAX_LEN, **options))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_verification_from_text_compares_with_the_librarys_scores(saved: Callable[[str], Path], name: str) -> None:
    from hdexport.checkpoint import find_checkpoint
    from hdexport.verify import Grid, Verification, with_texts
    from hdexport.verify.pytorch_reference import reference_of
    from hdruntime.bundle.reader import open_bundle

    bundle = open_bundle(saved(name) / "bundle")
    nothing = Verification(grid=Grid.FULL)
    found = with_texts(nothing, bundle, reference_of(bundle, find_checkpoint(saved(name) / "checkpoint")))
    assert not found.skipped
    assert len(found.texts) == 5
    assert all(check.passed for check in found.texts), found.failed
