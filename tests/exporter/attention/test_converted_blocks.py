"""A model that was given BigBird's, ETC's or a list's attention answers as PyTorch does with every pair counted."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hdexport.attention.blocks.random_tables import random_table
from hdexport.checkpoint import find_checkpoint
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.writer import seal
from support.answers import ATOL, assert_answers, distance, inputs_of
from support.comparators import assert_close
from support.grids import nightly_unless
from support.padded_batches import batches, cases
from support.tiny_models import COPIES, PAD_TOKEN_ID

BIGBIRD, ETC = "bigbird:block=4,random=3", "etc:global=6,block=4,tokens=3"
CONVERTED_TYPES = [
    name for name in SUPPORTED_MODEL_TYPES if family_of(name).why_not_converted is None and name not in COPIES
]

# Around a block, around the longest text that BigBird attends to densely (11 blocks of 4), a prime, the longest.
LENGTHS = (1, 3, 4, 5, 44, 45, 48, 49, 211)

SPECS = {
    "hf_eval": (BIGBIRD, None),
    "hf_eval by row": (BIGBIRD, "row"),
    "no random blocks": ("bigbird:block=8,random=0", "padded"),
    "drawn table": ("bigbird:block=4,random=2,seed=5", "row"),
    "one global token": ("etc:global=1,block=4", None),
    "whole blocks of global tokens, an id each": ("etc:global=10,block=5,tokens=3/4/5/6/7/8/9/10/11/12", None),
}


@functools.cache
def reference(path: Path, checkpoint: Path) -> Reference:
    return reference_of(open_bundle(path), find_checkpoint(checkpoint))


def of_kind(tiny_bundles, name: str):
    """A tiny RoBERTa with attention of that kind."""
    spec, last_block = SPECS[name]
    return tiny_bundles("roberta", attention=spec, last_block=last_block)


def check(bundle, *lengths: int, **options: Any) -> None:
    answers = reference(bundle.path, bundle.checkpoint)
    for tokens, name, input_ids, attention_mask in cases(lengths, sizes=(3,)):
        feeds = inputs_of(bundle, input_ids, attention_mask)
        assert_answers(bundle, feeds, answers.batch(feeds), case=(f"{tokens} tokens", name), **options)


@pytest.mark.parametrize(
    ("model_type", "spec"),
    # ALBERT's layers share their blocks.
    # ELECTRA's and ERNIE's are BERT's; RoBERTa has every kind below, and DistilBERT one block for a text.
    [nightly_unless(name == "albert", name, ETC) for name in CONVERTED_TYPES]
    + [nightly_unless(name == "bert", name, BIGBIRD) for name in ("albert", "bert", "roberta")],
)
def test_every_family_can_be_converted(tiny_bundles, model_type: str, spec: str) -> None:
    check(tiny_bundles(model_type, attention=spec), 44, 61)


@pytest.mark.parametrize(
    "name", [nightly_unless(name not in ("hf_eval by row", "one global token"), name) for name in SPECS]
)
def test_every_kind_is_right_at_every_length(tiny_bundles, name: str) -> None:
    check(of_kind(tiny_bundles, name), *LENGTHS)


def test_a_bert_becomes_the_big_bird_of_hugging_face_with_its_weights(tiny_bundles) -> None:
    """Their own model, given BERT's weights: nothing of ours counts the pairs."""
    bundle = tiny_bundles("bert", attention=BIGBIRD)
    bert = bundle.hugging_face.model
    config = transformers.BigBirdConfig(
        **{**bert.config.to_dict(), "model_type": "big_bird", "max_position_embeddings": bundle.manifest.max_len},
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=3,
    )
    big_bird = transformers.BigBirdModel(config, add_pooling_layer=False).eval()
    weights = {name: value for name, value in bert.state_dict().items() if not name.startswith("pooler")}
    big_bird.load_state_dict(weights)
    for tokens, name, input_ids, attention_mask in cases((45, 48, 211, 300), sizes=(3,)):
        feeds = inputs_of(bundle, input_ids, attention_mask)
        with torch.inference_mode():
            outputs = big_bird(**{name: torch.from_numpy(values) for name, values in feeds.items()})
        expected = {"last_hidden_state": outputs.last_hidden_state.numpy()}
        assert_answers(bundle, feeds, expected, graphs=["session"], case=(f"{tokens} tokens", name))


def test_etc_is_dense_attention_with_more_tokens_where_one_block_holds_the_text(tiny_bundles) -> None:
    """The global tokens are ordinary ones then, in front of the text: ids that BERT itself can be given."""
    bundle = tiny_bundles("distilbert", attention="etc:global=3,block=64,tokens=9")
    model = bundle.hugging_face.model
    embedded = []
    with torch.inference_mode():
        handle = model.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: embedded.append(kwargs["hidden_states"]), with_kwargs=True
        )
        ids = torch.randint(5, 100, (2, 60), generator=torch.Generator().manual_seed(0))
        model(torch.full((2, 3), 9))
        model(ids)
        handle.remove()
        both = torch.cat(embedded, dim=1)
        expected = model.transformer(hidden_states=both, attention_mask=None).last_hidden_state[:, 3:]
    got = bundle.session(input_ids=ids.numpy(), attention_mask=np.ones((2, 60), np.int64))["last_hidden_state"]
    assert_close(got, expected.numpy(), atol=ATOL)


@pytest.mark.parametrize("name", ["hf_eval by row", "drawn table", "whole blocks of global tokens, an id each"])
def test_padding_changes_nothing_by_row(tiny_bundles, name: str) -> None:
    bundle = of_kind(tiny_bundles, name)
    generator = np.random.default_rng(0)
    for length in (3, 44, 45, 61):
        text = generator.integers(5, 100, length)
        alone = bundle.portable(input_ids=text[None], attention_mask=np.ones((1, length), np.int64))
        for front, behind in ((0, 1), (0, 70), (5, 0), (33, 33)):
            ids = np.concatenate([np.full(front, PAD_TOKEN_ID), text, np.full(behind, PAD_TOKEN_ID)])[None]
            mask = np.pad(np.ones(length, np.int64), (front, behind))[None]
            padded = bundle.portable(input_ids=ids, attention_mask=mask)["last_hidden_state"]
            assert_close(padded[:, front : front + length], alone["last_hidden_state"], atol=ATOL)


def assert_differ(one, other, feeds: dict[str, np.ndarray]) -> None:
    """Hidden states, by two functions of a batch, that tests of this file would tell apart."""
    assert distance(*(answer(**feeds)["last_hidden_state"] for answer in (one, other))) > 100 * ATOL


def answers_of(path: Path, checkpoint: Path):
    """PyTorch's answers to what the manifest says, whatever the graphs compute."""
    return lambda **feeds: reference_of(open_bundle(path), find_checkpoint(checkpoint)).batch(feeds)


def test_the_last_block_of_the_padded_batch_is_another(tiny_bundles) -> None:
    """Could the tests above not tell the policies apart, they would prove nothing."""
    padded, row = (of_kind(tiny_bundles, name) for name in ("hf_eval", "hf_eval by row"))
    ids = np.random.default_rng(0).integers(5, 100, (1, 100))
    feeds = inputs_of(padded, ids, (np.arange(100) < 61).astype(np.int64)[None])
    states = [bundle.portable(**feeds)["last_hidden_state"][:, :61] for bundle in (padded, row)]
    assert distance(*states) > 100 * ATOL


def test_the_comparison_sees_other_attention(tiny_bundles, tmp_path: Path) -> None:
    """Other sizes, a table in the place of blocks 0, another kind, another table."""
    default, drawn, etc = (of_kind(tiny_bundles, name) for name in ("hf_eval", "drawn table", "one global token"))
    _, *batch = next(batches(211))
    feeds = inputs_of(default, *batch)
    for other in (drawn, etc):
        assert_differ(default.session, answers_of(other.path, other.checkpoint), feeds)
    changed = iter(range(9))

    def changed_copy(bundle, **wrong: int) -> Path:
        path = shutil.copytree(bundle.path, tmp_path / str(next(changed)))
        (record,) = bundle.manifest.attention
        if not wrong:
            np.save(path / "listed_blocks.npy", np.load(path / "listed_blocks.npy")[::-1])
        seal(path, dataclasses.replace(bundle.manifest, attention=({**record, **wrong},)))
        return path

    for bundle, wrong in ((default, {"random_blocks": 2}), (default, {"block_size": 5}), (drawn, {})):
        assert_differ(bundle.session, answers_of(changed_copy(bundle, **wrong), bundle.checkpoint), feeds)


def test_layers_draw_blocks_of_their_own(tiny_bundles) -> None:
    table = np.load(of_kind(tiny_bundles, "drawn table").path / "listed_blocks.npy")
    assert table.shape == (2, 4, 73, 2)
    sizes = {"heads": 4, "max_tokens": 300, "block_size": 4, "random_blocks": 2}
    for layer, drawn in enumerate(table):
        np.testing.assert_array_equal(drawn, random_table(**sizes, seed=5 + layer))
    assert (table[0] != table[1]).any()


def test_a_list_of_all_blocks_is_dense_attention_and_one_of_few_is_not(tiny_bundles, tmp_path: Path) -> None:
    blocks = -(-300 // 8)
    every = np.tile(np.arange(blocks), (1, blocks, 1))
    files = {"every": np.full((1, blocks), blocks), "first": np.ones((1, blocks), np.int64)}
    for name, counts in files.items():
        np.savez(tmp_path / f"{name}.npz", full_kv_num_blocks=counts, full_kv_indices=every)
    dense = tiny_bundles("roberta")
    listed, first = (tiny_bundles("roberta", attention=f"blocks:file={tmp_path / name}.npz,block=8") for name in files)
    lengths = (1, 8, 9, 211)
    for tokens, name, input_ids, attention_mask in cases(lengths, sizes=(3,)):
        feeds = inputs_of(dense, input_ids, attention_mask)
        assert_answers(listed, feeds, dense.session(**feeds), graphs=["session"], case=(f"{tokens} tokens", name))
    check(first, *lengths)


@pytest.mark.parametrize("spec", [nightly_unless(False, ETC), BIGBIRD])
def test_half_precision_keeps_directions(tiny_bundles, spec: str) -> None:
    check(tiny_bundles("bert", precision="float16", attention=spec), 1, 45, 211, cosine=0.999)


def test_no_two_tokens_meet_outside_our_operator(tiny_bundles) -> None:
    for spec in (BIGBIRD, ETC):
        bundle = tiny_bundles("bert", attention=spec)
        assert bundle.manifest.operators == {"hdexport::BlockSparseAttention": 2}
        assert "Softmax" not in {node.op_type for node in bundle.graph.graph}


@pytest.mark.parametrize("name", ["hf_eval", "hf_eval by row"])
def test_a_verification_passes_and_checks_around_the_blocks(tiny_bundles, name: str) -> None:
    bundle = of_kind(tiny_bundles, name)
    opened = open_bundle(bundle.path)
    checks = verify_bundle(opened, reference(bundle.path, bundle.checkpoint), grid=Grid.FULL).checks
    assert all(check.passed for check in checks)
    assert {43, 44, 45, 48} <= {check.case.tokens for check in checks}
    assert {check.case.padding for check in checks} == {"none", "right", "left"}
