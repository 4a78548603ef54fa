"""Reformer answers as Hugging Face does, and so does a BERT with its attention; wrong hashes are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.verify import Grid
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.answers import ATOL, assert_answers, assert_as_hugging_face, inputs_of
from support.attention_records import recorded
from support.comparators import assert_close
from support.grids import nightly_unless
from support.padded_batches import batches, cases
from support.tampered_bundles import tampered
from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE
from support.verified import verified

LENGTHS = (7, 8, 9, 15, 16, 17, 24, 33, 211)
"""Around chunks of both sizes, and whole chunks; a prime."""

LONG: dict[str, Any] = {
    "max_len": 4096,
    "attn_layers": ["local", "lsh"],
    "local_attn_chunk_length": 64,
    "lsh_attn_chunk_length": 64,
    "num_buckets": [8, 16],
    "num_hashes": 3,
    "lsh_num_chunks_after": 1,
}
"""Chunks of a real model, on both sides, three rounds of buckets in two factors; 64 positions become 4096."""

VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"is_decoder": True, "attn_layers": ["local", "lsh"]},
    "one round, more chunks than short texts have": {
        "attn_layers": ["lsh", "local"],
        "num_hashes": 1,
        "lsh_num_chunks_before": 3,
        "local_num_chunks_before": 2,
        "local_num_chunks_after": 2,
    },
    "local layers alone, positions in a table": {"attn_layers": ["local", "local"], "axial_pos_embds": False},
    "chunks of which neither divides the other": {"lsh_attn_chunk_length": 12, "attn_layers": ["lsh", "local"]},
}


def test_both_graphs_answer_as_hugging_face(tiny_bundles) -> None:
    assert_as_hugging_face(tiny_bundles("reformer"), LENGTHS, sizes=(1, 3))


each_variant = pytest.mark.parametrize(
    ("changes", "lengths"),
    [(changes, LENGTHS) for changes in VARIANTS.values()] + [(LONG, (63, 64, 65, 129))],
    ids=[*VARIANTS, "buckets in two factors"],
)


@each_variant
def test_what_is_traced_of_a_variant_answers_as_hugging_face(
    traced_models, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    assert_as_hugging_face(traced_models("reformer", **changes), lengths)


@pytest.mark.nightly
@each_variant
def test_both_graphs_of_a_variant_answer_as_hugging_face(
    tiny_bundles, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    assert_as_hugging_face(tiny_bundles("reformer", **changes), lengths, sizes=(1, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["fill-mask", "question-answering", "sentence-similarity", "text-classification"])
def test_the_tasks_answer_as_hugging_face(tiny_bundles, task: str) -> None:
    """A classifier reads the first token, which has no answer where it is padding."""
    bundle = tiny_bundles("reformer", task)
    for tokens, name, input_ids, attention_mask in cases((1, 33), sizes=(1, 3)):
        if task != "text-classification" or attention_mask[:, 0].all():
            feeds = inputs_of(bundle, input_ids, attention_mask)
            assert_answers(bundle, feeds, bundle.hugging_face(**feeds), case=(tokens, name))


def test_a_task_that_transformers_has_no_reformer_for_is_refused(tiny_bundles) -> None:
    checkpoint = find_checkpoint(tiny_bundles("reformer").checkpoint)
    message = r"token-classification of a reformer is not supported\. Transformers has no class(.|\n)*task='feature"
    with pytest.raises(ModelError, match=message):
        checkpoint.load(Task.TOKEN_CLASSIFICATION)


def test_texts_of_up_to_4096_tokens_answer_as_hugging_face(traced_models) -> None:
    bundle = traced_models("reformer", **LONG)
    name, input_ids, attention_mask = next(batch for batch in batches(4096, sizes=(1,)) if "right" in batch[0])
    feeds = inputs_of(bundle, input_ids, attention_mask)
    assert_answers(bundle, feeds, bundle.hugging_face(**feeds), case=(name,))


@pytest.mark.parametrize("spec", [None, "lsh:chunk=16,rounds=2"])
def test_two_calls_give_every_bit_alike(tiny_bundles, spec: str | None) -> None:
    bundle = tiny_bundles("bert" if spec else "reformer", attention=spec)
    _, input_ids, attention_mask = list(batches(129))[-1]
    feeds = inputs_of(bundle, input_ids, attention_mask)
    for run in (bundle.portable, bundle.session):
        first, second = (run(**feeds)["last_hidden_state"] for _ in range(2))
        np.testing.assert_array_equal(first, second)


def test_the_output_is_as_wide_as_both_streams(tiny_bundles) -> None:
    bundle = tiny_bundles("reformer")
    assert bundle.manifest.hidden_size == 64
    assert recorded(bundle.manifest, "lsh").layers == ("local", "lsh", "local", "lsh")


def test_padding_to_whole_chunks_changes_nothing_and_more_does(tiny_bundles) -> None:
    bundle = tiny_bundles("reformer")
    assert bundle.manifest.padding.multiple_of == 16
    ids = np.random.default_rng(0).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, 80))
    mask = (np.arange(80) < 55).astype(np.int64)[None]
    found = [
        bundle.portable(input_ids=ids[:, :tokens], attention_mask=mask[:, :tokens])["last_hidden_state"][:, :55]
        for tokens in (55, 64, 80)
    ]
    assert_close(found[1], found[0], atol=ATOL)
    assert np.abs(found[2] - found[0]).max() > 100 * ATOL


# A BERT with hashes.

CONVERSIONS = (
    "lsh:chunk=16,rounds=2",
    "lsh:chunk=5,rounds=3,buckets=2/4,after=1,seed=9",
    "lsh:chunk=300",
)


@pytest.mark.parametrize(
    ("model_type", "spec", "grid"),
    [
        ("bert", CONVERSIONS[0], Grid.QUICK),
        *(
            nightly_unless(False, model_type, spec, Grid.FULL)
            for model_type in ("albert", "bert", "roberta")
            for spec in CONVERSIONS
        ),
    ],
)
def test_a_bert_with_hashes_is_that_with_the_librarys_attention(
    tiny_bundles, model_type: str, spec: str, grid: Grid
) -> None:
    bundle = tiny_bundles(model_type, attention=spec)
    found = verified(bundle, grid=grid)
    assert found.passed, found.failed
    assert {check.graph for check in found.checks} == {"model.onnx", "onnxruntime_cpu.onnx"}
    (line,) = found.information
    assert "of the 16 keys with the largest scores of each query" in line


def test_padding_changes_nothing_where_chunks_are_each_texts_own(tiny_bundles) -> None:
    bundle = tiny_bundles("bert", attention=CONVERSIONS[0])
    assert bundle.manifest.padding is None
    for name, input_ids, attention_mask in batches(129):
        feeds = inputs_of(bundle, input_ids, attention_mask)
        for run in (bundle.portable, bundle.session):
            together = run(**feeds)["last_hidden_state"]
            for row, mask in enumerate(attention_mask):
                last = np.flatnonzero(mask)[-1] + 1
                alone = run(**{key: values[row : row + 1, :last] for key, values in feeds.items()})
                real = mask[:last] == 1
                assert_close(together[row, :last][real], alone["last_hidden_state"][0, real], atol=ATOL)
                assert name


@pytest.mark.parametrize(
    ("precision", "graphs"),
    [
        ("float16", {"model.onnx", "onnxruntime_cpu.onnx"}),
        # ONNX Runtime has no bfloat16 on a CPU.
        nightly_unless(False, "bfloat16", {"onnxruntime_cpu.onnx"}),
    ],
)
def test_half_precision_is_right_for_the_hashes_that_it_decides(tiny_bundles, precision: str, graphs: set[str]) -> None:
    # The bundle of test_sparse_engine.py.
    bundle = tiny_bundles("reformer", precision=precision, max_len=1000, attention_head_size=32)
    found = verified(bundle)
    assert found.passed, found.failed
    assert {check.graph for check in found.checks} == graphs


# Wrong graphs.


def other_rotations(model: ir.Model) -> None:
    """As if drawn with another seed, in one direction of the first head."""
    (rotations,) = {node.inputs[3] for node in model.graph if node.op_type.startswith("LSHAttention")}
    values = rotations.const_value.numpy().copy()
    values[0, :, 0, 0] = values[0, ::-1, 0, 0]
    rotations.const_value = ir.tensor(values, name=rotations.name)


def other_values(model: ir.Model) -> None:
    """Queries in place of values in the last layer, after which nothing is decided."""
    *_, node = (node for node in model.graph if node.op_type.startswith("LSHAttention"))
    node.replace_input_with(1, node.inputs[0])


@pytest.mark.parametrize(
    ("change", "decides", "spec", "file"),
    [
        (other_rotations, True, CONVERSIONS[0], "onnxruntime_cpu.onnx"),
        (other_values, False, CONVERSIONS[0], "model.onnx"),
    ],
)
def test_a_wrong_graph_fails_and_wrong_hashes_are_named(
    tiny_bundles, tmp_path, change: Any, decides: bool, spec: str | None, file: str
) -> None:
    bundle = tiny_bundles("bert" if spec else "reformer", attention=spec)
    found = verified(bundle, tampered(bundle, tmp_path / "wrong", change, file))
    assert all(check.passed for check in found.checks if check.graph != file)
    failed = [check for check in found.checks if not check.passed]
    assert failed
    wrong = [check for check in failed if check.wrong_decisions]
    assert bool(wrong) == decides
    if decides:
        assert any("tokens in a bucket of a smaller product" in decision for decision in wrong[0].wrong_decisions)
        assert wrong[0].record()["wrong_decisions"] == list(wrong[0].wrong_decisions)
