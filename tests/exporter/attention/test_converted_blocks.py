"""A model that was given BigBird's, ETC's or a list's attention answers as PyTorch does with every pair counted.

Every run has graphs of BigBird's blocks of the padded batch (BERT), of a drawn table by row (RoBERTa) and of global
tokens (DistilBERT), and what is traced with a list (XLM-RoBERTa-XL); other mixtures and families are nightly.
"""

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
from hdexport.families import convertible_model_types, family_of
from hdexport.support.bundle_writer import seal
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.bundle.reader import open_bundle
from support.answers import ATOL, assert_answers, distance, inputs_of
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.padded_batches import batches, cases
from support.tiny_models import COPIES, PAD_TOKEN_ID

BIGBIRD, DRAWN = "bigbird:block=4,random=3", "bigbird:block=4,random=2,seed=5"
ETC = "etc:global=6,block=4,tokens=3"
CONVERTED_TYPES = [name for name in convertible_model_types() if name not in COPIES]

# Around a block, around the longest text that BigBird attends to densely (11 blocks of 4), a prime, the longest.
LENGTHS = (1, 3, 4, 5, 44, 45, 48, 49, 211)


@functools.cache
def reference(path: Path, checkpoint: Path) -> Reference:
    return reference_of(open_bundle(path), find_checkpoint(checkpoint))


@pytest.fixture
def bigbird(tiny_bundles) -> Any:
    """Blocks of the padded batch, all random ones block 0."""
    return tiny_bundles("bert", attention=BIGBIRD)


@pytest.fixture
def drawn(tiny_bundles) -> Any:
    """Blocks by row, random ones of a table that was drawn."""
    return tiny_bundles("roberta", attention=DRAWN, last_block="row")


@pytest.fixture
def etc(tiny_bundles) -> Any:
    """Global tokens of an id each, which fill no block, in front of texts of which short ones have one."""
    return tiny_bundles("distilbert", attention="etc:global=3,block=64,tokens=9/8/7")


def check(bundle, *lengths: int, **options: Any) -> None:
    answers = reference(bundle.path, bundle.checkpoint)
    for tokens, name, input_ids, attention_mask in cases(lengths, sizes=(3,)):
        feeds = inputs_of(bundle, input_ids, attention_mask)
        assert_answers(bundle, feeds, answers.batch(feeds), case=(f"{tokens} tokens", name), **options)


def test_bigbirds_blocks_are_right_around_a_block_and_the_longest_dense_text(bigbird) -> None:
    check(bigbird, *LENGTHS)


def test_a_drawn_tables_blocks_are_right_by_row(drawn) -> None:
    check(drawn, 1, 4, 5, 36, 37, 211)


def test_etcs_blocks_are_right_around_a_block(etc) -> None:
    check(etc, 1, 61, 62, 65, 211)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "spec"),
    [(name, ETC) for name in CONVERTED_TYPES if family_of(name).learned_positions]
    + [(name, BIGBIRD) for name in ("albert", "bert", "esm", "roberta")],
)
def test_every_family_can_be_converted(tiny_bundles, model_type: str, spec: str) -> None:
    check(tiny_bundles(model_type, attention=spec), 44, 61)


def test_a_bert_becomes_the_big_bird_of_hugging_face_with_its_weights(bigbird) -> None:
    """Their own model, given BERT's weights: nothing of ours counts the pairs."""
    bundle, bert = bigbird, bigbird.hugging_face.model
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


def test_etc_is_dense_attention_with_more_tokens_where_one_block_holds_the_text(etc) -> None:
    """The global tokens are ordinary ones then, in front of the text: ids that BERT itself can be given."""
    model = etc.hugging_face.model
    embedded = []
    with torch.inference_mode():
        handle = model.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: embedded.append(kwargs["hidden_states"]), with_kwargs=True
        )
        ids = torch.randint(5, 100, (2, 60), generator=torch.Generator().manual_seed(0))
        model(torch.tensor([[9, 8, 7]] * 2))
        model(ids)
        handle.remove()
        both = torch.cat(embedded, dim=1)
        expected = model.transformer(hidden_states=both, attention_mask=None).last_hidden_state[:, 3:]
    got = etc.session(input_ids=ids.numpy(), attention_mask=np.ones((2, 60), np.int64))["last_hidden_state"]
    assert_close(got, expected.numpy(), atol=ATOL)


@pytest.mark.parametrize("kind", ["drawn", "etc"])
def test_padding_changes_nothing_by_row(request, kind: str) -> None:
    bundle = request.getfixturevalue(kind)
    generator = np.random.default_rng(0)
    for length in (3, 44, 45, 61):
        text = generator.integers(5, 100, length)
        alone = answer_of(bundle, text[None], np.ones((1, length), np.int64))
        for front, behind in ((0, 1), (0, 70), (5, 0), (33, 33)):
            ids = np.concatenate([np.full(front, PAD_TOKEN_ID), text, np.full(behind, PAD_TOKEN_ID)])[None]
            padded = answer_of(bundle, ids, np.pad(np.ones(length, np.int64), (front, behind))[None])
            if bundle.manifest.positions.first_row or not front:
                # DistilBERT's positions count padding on the left.
                assert_close(padded[:, front : front + length], alone, atol=ATOL)


def answer_of(bundle: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    given = {spec.name: feeds[spec.name] for spec in bundle.manifest.inputs}
    return bundle.portable(**given)["last_hidden_state"]


def assert_differ(one, other, feeds: dict[str, np.ndarray]) -> None:
    """Hidden states, by two functions of a batch, that tests of this file would tell apart."""
    assert distance(*(answer(**feeds)["last_hidden_state"] for answer in (one, other))) > 100 * ATOL


def answers_of(path: Path, checkpoint: Path):
    """PyTorch's answers to what the manifest says, whatever the graphs compute."""
    return lambda **feeds: reference_of(open_bundle(path), find_checkpoint(checkpoint)).batch(feeds)


def test_the_comparison_sees_other_attention(bigbird, drawn, tmp_path: Path) -> None:
    """Fewer random blocks, and another table."""
    changed = iter(range(9))

    def changed_copy(bundle, **wrong: object) -> Path:
        path = shutil.copytree(bundle.path, tmp_path / str(next(changed)))
        (record,) = bundle.manifest.attention
        if not wrong:
            np.save(path / "listed_blocks.npy", np.load(path / "listed_blocks.npy")[::-1])
        seal(path, dataclasses.replace(bundle.manifest, attention=({**record, **wrong},)))
        return path

    for bundle, wrong in (
        (bigbird, {"random_blocks": 2}),
        (drawn, {}),
    ):
        name, *batch = next(each for each in batches(211) if "right" in each[0])
        feeds = inputs_of(bundle, *batch)
        with named_case(name, wrong):
            assert_differ(bundle.session, answers_of(changed_copy(bundle, **wrong), bundle.checkpoint), feeds)


def test_layers_draw_blocks_of_their_own(drawn) -> None:
    table = np.load(drawn.path / "listed_blocks.npy")
    assert table.shape == (2, 4, 73, 2)
    sizes = {"heads": 4, "max_tokens": 300, "block_size": 4, "random_blocks": 2}
    for layer, drawn in enumerate(table):
        np.testing.assert_array_equal(drawn, random_table(**sizes, seed=5 + layer))
    assert (table[0] != table[1]).any()


LISTED = 4


def list_of_first_blocks(folder: Path) -> str:
    """The option by which every token sees the first blocks."""
    blocks = -(-300 // 8)
    counts, indices = np.full((1, blocks), LISTED), np.tile(np.arange(blocks), (1, blocks, 1))
    np.savez(folder / "first.npz", full_kv_num_blocks=counts, full_kv_indices=indices)
    return f"blocks:file={folder / 'first.npz'},block=8"


def test_a_list_of_the_first_blocks_is_dense_attention_up_to_them_and_not_beyond(traced_models, tmp_path: Path) -> None:
    dense = traced_models("xlm-roberta-xl")
    listed = traced_models("xlm-roberta-xl", attention=list_of_first_blocks(tmp_path))
    for tokens, name, input_ids, attention_mask in cases((1, 8, 9, 8 * LISTED), sizes=(3,)):
        feeds = inputs_of(dense, input_ids, attention_mask)
        assert_answers(listed, feeds, dense.traced(**feeds), case=(f"{tokens} tokens", name))
    ids = np.random.default_rng(0).integers(5, 100, (1, 8 * LISTED + 1))
    assert_differ(listed.traced, dense.traced, inputs_of(dense, ids, np.ones_like(ids)))


def test_half_precision_keeps_directions(tiny_bundles) -> None:
    """The bundle of test_sparse_engine.py, which has a table of its own; it attends densely up to 448 tokens."""
    sizes = {"block_size": 64, "num_random_blocks": 1, "num_hidden_layers": 2}
    sizes |= {"hidden_size": 128, "initializer_range": 0.1}
    bundle = tiny_bundles("big_bird", precision="float16", max_len=1000, attention="bigbird:mode=table", **sizes)
    check(bundle, 1, 65, 449, cosine=0.999)


def test_no_two_tokens_meet_outside_our_operator(bigbird, etc) -> None:
    for bundle in (bigbird, etc):
        assert bundle.manifest.operators == {"hdexport::BlockSparseAttention": 2}
        assert "Softmax" not in {node.op_type for node in bundle.graph.graph}


@pytest.mark.parametrize("kind", ["bigbird", nightly_unless(False, "drawn")])
def test_a_verification_passes_and_checks_around_the_blocks(request, kind: str) -> None:
    bundle = request.getfixturevalue(kind)
    opened = open_bundle(bundle.path)
    longest = 44 if kind == "bigbird" else 36
    checks = verify_bundle(opened, reference(bundle.path, bundle.checkpoint), grid=Grid.FULL).checks
    assert all(check.passed for check in checks)
    assert {longest - 1, longest, longest + 1, longest + 4} <= {check.case.tokens for check in checks}
    assert {check.case.padding for check in checks} == {"none", "right", "left"}
