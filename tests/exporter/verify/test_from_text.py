"""Bundles answer to texts as the checkpoint's own library does by its plain call; a bundle that does not is found."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.tokenizer_files import write_tokenizer
from hdexport.checkpoint.trust import Trust
from hdexport.cli.verification_table import outcome_line
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdexport.support.bundle_writer import seal
from hdexport.verify import Check, Grid, Verification, with_texts
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.manifest import Task, TokenizerSource
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.verification import Skip, SkipCause
from support.family_tasks import tasks_of
from support.file_tokenizers import put_tokenizer, word_pieces
from support.grids import nightly_unless
from support.tiny_models import change_json

DAILY = {
    ("bert", "feature-extraction"),
    ("bert", "text-classification"),
    # The question is global. The tiny tokenizer has one separator fewer than transformers' code wants.
    ("longformer", "question-answering"),
    # Counts distances: max_position_embeddings of config.json is where sentence-transformers cuts.
    ("deberta-v2", "sentence-similarity"),
    # A short text makes the library's model another one.
    ("big_bird", "feature-extraction"),
    ("t5", "feature-extraction"),
    ("xlnet", "feature-extraction"),
    ("reformer", "feature-extraction"),
}

LEFT_OUT = {
    ("longformer", "question-answering"): "its own call fails on the pair: There should be exactly three separator",
    ("neomme", "sentence-similarity"): "it does not load",
    ("transfo-xl", "text-scoring"): "transformers no longer has such a model",
} | {("reformer", task): "PyTorch cannot follow its decisions" for task in Task}
"""What transformers or sentence-transformers cannot answer to -> why, as the report says."""

ELSEWHERE = (Task.SPARSE_SIMILARITY, Task.TOKEN_SIMILARITY, Task.HYBRID_SIMILARITY)
"""Tasks of checkpoints with files beside the model: test_sparse_encoder.py, test_multi_vector_encoder.py and
test_hybrid_similarity.py."""

EVERY = [
    nightly_unless((name, task) in DAILY, name, task)
    for name in SUPPORTED_MODEL_TYPES
    for task in tasks_of(name)
    if task not in ELSEWHERE
]


def checked(bundle: Bundle, checkpoint: Path, grid: Grid = Grid.FULL) -> tuple[dict[str | None, Check], list[Skip]]:
    """The checks by the name of the text, and what was left out."""
    nothing = Verification(grid=grid)
    found = with_texts(nothing, bundle, reference_of(bundle, find_checkpoint(checkpoint)))
    return {check.text: check for check in found.texts}, list(found.skipped)


def failed(checks: dict[str | None, Check]) -> set[str | None]:
    return {text for text, check in checks.items() if not check.passed}


@pytest.mark.parametrize(("model_type", "task"), EVERY)
def test_a_bundle_answers_to_texts_as_the_library_does(tiny_bundles, model_type: str, task: str) -> None:
    bundle = tiny_bundles(model_type, task)
    checks, left_out = checked(open_bundle(bundle.path), bundle.checkpoint)
    assert not failed(checks), checks
    reason = LEFT_OUT.get((model_type, task))
    assert bool(checks) == (reason is None)
    assert [reason in outcome_line(skip) for skip in left_out] == ([] if reason is None else [True])


def test_texts_are_cut_where_the_library_cuts_them(tiny_bundles) -> None:
    bundle = tiny_bundles("bert")
    manifest = open_bundle(bundle.path).manifest
    tokenizer = dataclasses.replace(manifest.tokenizer, truncation_side="left")
    other_side = Bundle(bundle.path, dataclasses.replace(manifest, tokenizer=tokenizer))
    checks, _ = checked(other_side, bundle.checkpoint)
    assert failed(checks) == {"long text"}
    assert checks["long text"].case.tokens == 64
    assert checks["long text"].failed_outputs == ("input_ids",)


def test_the_tokens_that_are_global_without_a_mark_are_the_librarys(tiny_bundles) -> None:
    """Of a classifier the first token is; a bundle that marks none of them differs in every text."""
    bundle = tiny_bundles("longformer", "text-classification")
    opened = open_bundle(bundle.path)
    checks, _ = checked(opened, bundle.checkpoint)
    assert not failed(checks)
    zeros = next(spec.default for spec in opened.manifest.inputs if spec.name == "attention_mask")
    inputs = tuple(
        dataclasses.replace(spec, default=dataclasses.replace(zeros, fill="zeros"))
        if spec.name == "global_attention_mask"
        else spec
        for spec in opened.manifest.inputs
    )
    checks, _ = checked(Bundle(bundle.path, dataclasses.replace(opened.manifest, inputs=inputs)), bundle.checkpoint)
    assert failed(checks) == set(checks)


@pytest.mark.parametrize(
    ("setting", "texts"),
    [
        ({"max_seq_length": 32}, {"max_seq_length"}),
        ({"prompts": {"query": "w1 w2 ", "document": ""}}, {"short text as a query", "long text as a query"}),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_settings_of_sentence_transformers_are_the_models(
    tiny_bundles, setting: dict[str, Any], texts: set[str]
) -> None:
    bundle = tiny_bundles("deberta-v2", "sentence-similarity")
    manifest = open_bundle(bundle.path).manifest
    wrong = dataclasses.replace(manifest.sentence, **setting)
    checks, _ = checked(Bundle(bundle.path, dataclasses.replace(manifest, sentence=wrong)), bundle.checkpoint)
    assert failed(checks) == texts


TASKS = ("sentence-similarity", "text-classification", "fill-mask", "question-answering", "token-classification")


@pytest.mark.parametrize("source", ["library", "file"])
@pytest.mark.parametrize("task", TASKS)
def test_a_bundle_of_the_files_ids_is_compared_with_the_library_given_the_file(
    tiny_bundles, tmp_path, task: str, source: TokenizerSource
) -> None:
    """A bundle that says the other differs in texts that the file and transformers' class split differently."""
    plain = tiny_bundles("bert", task)
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "bundle"
    shutil.copytree(plain.checkpoint, checkpoint)
    shutil.copytree(plain.path, path)
    put_tokenizer(checkpoint, word_pieces(), "BertTokenizer")
    info = write_tokenizer(find_checkpoint(checkpoint).with_source(source), path)
    assert info is not None
    checks, left_out = checked(Bundle(path, dataclasses.replace(plain.manifest, tokenizer=info)), checkpoint)
    assert not failed(checks), checks
    assert not left_out
    other = dataclasses.replace(info, source="library" if source == "file" else "file")
    checks, _ = checked(Bundle(path, dataclasses.replace(plain.manifest, tokenizer=other)), checkpoint)
    assert failed(checks) & {"pair", "other scripts"} == {"pair", "other scripts"} & set(checks) != set()


def test_an_empty_text_without_special_tokens_is_no_case(tiny_bundles, tmp_path) -> None:
    """Neither library runs it, and a session refuses it."""
    right = tiny_bundles("deberta-v2", "sentence-similarity")
    for folder in (right.path, right.checkpoint):
        shutil.copytree(folder, tmp_path / folder.name)
        file = tmp_path / folder.name / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    seal(tmp_path / right.path.name, right.manifest)
    checks, left_out = checked(open_bundle(tmp_path / right.path.name), tmp_path / right.checkpoint.name)
    assert not failed(checks), checks
    assert not left_out
    assert {"short text", "long text"} <= set(checks)
    assert "empty text" not in checks


def test_a_text_that_the_library_itself_cannot_read_ends_the_comparison_with_the_reason(tiny_bundles, tmp_path) -> None:
    """A vocabulary without an unknown token knows none of the texts' words: a build goes on and says so."""
    right = tiny_bundles("bert")
    for folder in (right.path, right.checkpoint):
        shutil.copytree(folder, tmp_path / folder.name)
        file = tmp_path / folder.name / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["unk_token"] = "none"
        file.write_text(json.dumps(content))
    seal(tmp_path / right.path.name, right.manifest)
    checks, left_out = checked(open_bundle(tmp_path / right.path.name), tmp_path / right.checkpoint.name, Grid.QUICK)
    assert not checks
    assert "its own call fails on the short text: WordLevel error: Missing [UNK] token" in left_out[0].detail


def test_the_quick_grid_leaves_sentence_transformers_to_the_command(tiny_bundles) -> None:
    bundle = tiny_bundles("deberta-v2", "sentence-similarity")
    checks, left_out = checked(open_bundle(bundle.path), bundle.checkpoint, Grid.QUICK)
    assert not checks
    assert len(left_out) == 1
    assert left_out[0].cause is SkipCause.SLOW_IMPORT
    assert outcome_line(left_out[0]).endswith("takes as long as the build: hdexport verify BUNDLE")


OWN_CODE = """
from transformers import DebertaV2Model

class Shifted(DebertaV2Model):
    def forward(self, *args, **options):
        found = super().forward(*args, **options)
        found["last_hidden_state"] = found["last_hidden_state"] + 0.5
        return found
"""


def test_code_of_the_checkpoint_is_run_by_the_library_where_it_is_trusted(tiny_bundles, tmp_path) -> None:
    """The library's model is the checkpoint's own then, and no other takes its place."""
    bundle = tiny_bundles("deberta-v2", "sentence-similarity")
    path = tmp_path / "theirs"
    shutil.copytree(bundle.checkpoint, path)
    (path / "theirs.py").write_text(OWN_CODE)
    change_json(path / "config.json", auto_map={"AutoModel": "theirs.Shifted"})
    reference = reference_of(open_bundle(bundle.path), find_checkpoint(path))
    nothing = Verification(grid=Grid.FULL)
    found = with_texts(nothing, open_bundle(bundle.path), reference)
    assert not any(not check.passed for check in found.texts)
    assert found.skipped == (Skip(cause=SkipCause.UNTRUSTED_CODE, graph="code: theirs.Shifted"),)
    reference.checkpoint = dataclasses.replace(reference.checkpoint, trust=Trust(trust_remote_code=True))
    found = with_texts(nothing, open_bundle(bundle.path), reference)
    assert {check.text for check in found.texts if check.passed} == {"max_seq_length"}
    assert found.skipped == ()


@pytest.mark.parametrize("task", ["feature-extraction", "sentence-similarity"])
def test_a_bundle_of_fewer_tokens_than_the_special_ones_has_no_text_to_compare(tiny_bundles, task: str) -> None:
    bundle = tiny_bundles("bert", task, max_len=1)
    checks, left_out = checked(open_bundle(bundle.path), bundle.checkpoint)
    assert set(checks) <= {"max_seq_length"}
    assert not failed(checks)
    assert checks or (left_out[0].cause, left_out[0].limit) == (SkipCause.NO_TEXT_FITS, 1)
