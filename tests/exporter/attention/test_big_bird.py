"""BigBird and BigBird-Pegasus' encoder answer as Hugging Face does: at any length, by both kinds of last block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hdexport.attention.blocks import BlockSparse, LastBlock, Mode, Pattern
from hdexport.attention.blocks.conversion import BlockConversion
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.extend import ExtendOptions, extend
from hdexport.families import family_of
from hdexport.model.half_precision import cast_model
from hdexport.model.surgery import extend_positions
from hdruntime.bundle.manifest import PaddingRule, Scheme, Task
from hdruntime.errors import ModelError
from support.answers import ATOL, assert_answers, assert_as_hugging_face, distance, inputs_of
from support.attention_records import recorded
from support.comparators import assert_close, named_case
from support.padded_batches import batches, cases
from support.tiny_models import BASE, BLOCK_SIZE, PAD_TOKEN_ID, RANDOM_BLOCKS, SEPARATOR_ID, VOCAB_SIZE, save_tiny_model

LIMIT = (5 + 2 * RANDOM_BLOCKS) * BLOCK_SIZE
"""The longest text that is attended to densely, 44 tokens."""

# Long, short, long: what the library makes of itself for a short text must not be left to the next.
LENGTHS = (LIMIT + 1, LIMIT, LIMIT + 4, LIMIT - 1, LIMIT + 5, 24, LIMIT + 3)

MODEL_TYPES = ("big_bird", "bigbird_pegasus")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_one_session_answers_as_hugging_face_above_and_below_the_limit(tiny_bundles, model_type: str) -> None:
    assert_as_hugging_face(tiny_bundles(model_type), LENGTHS, sizes=(1, 3))


VARIANT = {
    "rescale_embeddings": True,
    "use_bias": False,
    "type_vocab_size": 16,
    "num_random_blocks": 1,
    "hidden_act": "relu",
}


# Blocks of a published model's size, and of one that is no power of 2; the definition has every pair of tokens.
@pytest.mark.parametrize(("block_size", "longest"), [(64, 600), (7, 300)])
def test_what_is_traced_of_a_variant_answers_as_hugging_face(traced_models, block_size: int, longest: int) -> None:
    bundle = traced_models("big_bird", max_len=longest, block_size=block_size, **VARIANT)
    limit = (5 + 2 * 1) * block_size
    for tokens, real in ((longest, longest), (limit, limit), (longest - 89, longest - 90), (limit + 1, limit - 7)):
        feeds = inputs_of(bundle, ids_of(tokens).numpy(), (np.arange(tokens) < real).astype(np.int64)[None], types=16)
        assert_answers(bundle, feeds, bundle.hugging_face(**feeds), case=(f"{tokens} tokens, {real} real",))


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "block_size"), [("big_bird", 64), ("bigbird_pegasus", 16)])
def test_both_graphs_answer_as_hugging_face_at_4096_tokens(tiny_bundles, model_type: str, block_size: int) -> None:
    bundle = tiny_bundles(model_type, max_len=4096, block_size=block_size)
    limit = (5 + 2 * RANDOM_BLOCKS) * block_size
    for tokens, real in ((4096, 4096), (limit, limit), (3000, 2900), (limit + 1, limit - block_size)):
        feeds = inputs_of(bundle, ids_of(tokens).numpy(), (np.arange(tokens) < real).astype(np.int64)[None])
        assert_answers(bundle, feeds, bundle.hugging_face(**feeds))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_with_blocks_by_row_each_text_answers_as_hugging_face_alone(traced_models, model_type: str) -> None:
    bundle = traced_models(model_type, last_block="row")
    for tokens in (LIMIT + 1, LIMIT, 2 * LIMIT + 3):
        for name, input_ids, attention_mask in batches(tokens):
            feeds = inputs_of(bundle, input_ids, attention_mask)
            got = bundle.traced(**feeds)["last_hidden_state"]
            for row, real in enumerate(attention_mask):
                first, last = np.flatnonzero(real)[[0, -1]]
                text = slice(first, last + 1)
                alone = {key: values[row : row + 1, text] for key, values in feeds.items()}
                # The positions that the text has in its row; Pegasus takes none, which padding on the left shifts.
                if model_type == "big_bird":
                    alone["position_ids"] = np.arange(first, last + 1)[None]
                elif first:
                    continue
                expected = bundle.hugging_face(**alone)["last_hidden_state"][0]
                with named_case(name, f"row {row}"):
                    assert_close(got[row, real == 1], expected[real[text] == 1], atol=ATOL)


def test_padding_changes_nothing_by_row_and_the_answer_where_blocks_are_those_of_the_batch(traced_models) -> None:
    """Could the tests above not tell the two kinds of last block apart, they would prove nothing."""
    tokens = LIMIT + 9
    input_ids = np.random.default_rng(0).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, tokens))
    more = np.pad(input_ids, [(0, 0), (0, 2 * BLOCK_SIZE)], constant_values=7)
    mask = (np.arange(more.shape[1]) < tokens).astype(np.int64)[None]
    changes = {}
    for last_block in ("row", None):
        run = traced_models("big_bird", last_block=last_block).traced
        short, padded = (
            run(input_ids=ids, attention_mask=real, token_type_ids=np.zeros_like(ids))["last_hidden_state"][:, :tokens]
            for ids, real in ((input_ids, np.ones_like(input_ids)), (more, mask))
        )
        changes[last_block] = distance(short, padded)
    assert changes["row"] < ATOL
    assert changes[None] > 1000 * ATOL


def loaded(checkpoint: Path, model_type: str, *, max_len: int) -> torch.nn.Module:
    """A model with that many positions, extended and nothing else."""
    model = find_checkpoint(checkpoint).load(Task.FEATURE_EXTRACTION)
    extend_positions(model, family_of(model_type), max_len=max_len, scheme=Scheme.HIERARCHICAL, alpha=0.4)
    return model


def ids_of(tokens: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(tokens).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, tokens)))


@torch.inference_mode()
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_reference_forgets_short_texts_and_knows_its_new_length(tmp_path: Path, model_type: str) -> None:
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    new, spoilt, reference = (loaded(tmp_path, model_type, max_len=1024) for _ in range(3))
    long = ids_of(LIMIT + 5)
    expected = new(long).last_hidden_state.numpy()
    # The library itself: after a short text, the same text gets another answer, and 1024 tokens get none.
    with pytest.raises(RuntimeError, match="size"):
        spoilt(ids_of(1024))
    spoilt(ids_of(LIMIT))
    assert distance(spoilt(long).last_hidden_state.numpy(), expected) > 0.01
    family_of(model_type).as_trained(reference)
    for _ in range(2):
        reference(ids_of(LIMIT))
        assert_close(reference(long).last_hidden_state.numpy(), expected, atol=0)
    assert reference(ids_of(1024)).last_hidden_state.isfinite().all()


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["fill-mask", "sentence-similarity", "text-classification", "token-classification"])
def test_every_task_answers_as_hugging_face(tiny_bundles, task: str) -> None:
    """The heads are BERT's, whose tasks every run tries in test_families.py."""
    bundle = tiny_bundles("big_bird", task)
    for tokens, name, input_ids, attention_mask in cases((LIMIT, LIMIT + 5), sizes=(3,)):
        if task == "text-classification" and not attention_mask[:, 0].all():
            continue  # The head reads token 0. If that is padding, its answer is that of no token.
        feeds = inputs_of(bundle, input_ids, attention_mask)
        assert_answers(bundle, feeds, bundle.hugging_face(**feeds), case=(f"{tokens} tokens", name))


def test_question_answering_takes_the_question_out_as_hugging_face_does(tiny_bundles) -> None:
    bundle = tiny_bundles("big_bird", "question-answering")
    generator = np.random.default_rng(0)
    for tokens in (LIMIT, LIMIT + 5):
        input_ids = generator.integers(SEPARATOR_ID + 1, VOCAB_SIZE, (5, tokens))
        attention_mask, taken_out = np.ones_like(input_ids), np.zeros_like(input_ids, dtype=bool)
        # Twice in a text, at its beginning, at its end, nowhere, where nothing is taken out, and before padding.
        for row, places in enumerate(([9, 30], [0], [tokens - 1], [], [1])):
            input_ids[row, places] = SEPARATOR_ID
        taken_out[0, 1:10] = taken_out[2, 1:] = taken_out[4, 1:2] = True
        attention_mask[4, tokens - 10 :] = 0
        inputs = inputs_of(bundle, input_ids, attention_mask)
        expected = bundle.hugging_face(**inputs)
        for run in (bundle.portable, bundle.session):
            got = run(**inputs)
            for name in ("start_logits", "end_logits"):
                kept = ~taken_out & (attention_mask == 1)
                assert_close(got[name][kept], expected[name][kept], atol=ATOL)
                assert (got[name][taken_out] < -9e5).all()
                np.testing.assert_array_max_ulp(got[name][taken_out], expected[name][taken_out], maxulp=1)


def test_pairs_of_texts_have_the_types_that_hugging_face_finds_for_itself(tiny_bundles) -> None:
    bundle = tiny_bundles("big_bird", "question-answering")
    questions = ["w7 w8 w9", "w1", " ".join(f"w{index}" for index in range(40))]
    contexts = ["w20 w21 w22 w23 w24", " ".join(f"w{index}" for index in range(90)), "w3"]
    encodings = bundle.session.tokenize(questions, contexts)
    for encoding, result in zip(encodings, bundle.session.infer(encodings), strict=True):
        input_ids = np.array([encoding.input_ids])
        context = slice(encoding.input_ids.index(SEPARATOR_ID) + 1, None)
        expected = bundle.hugging_face(input_ids, np.ones_like(input_ids))
        other_types = bundle.hugging_face(input_ids, np.ones_like(input_ids), token_type_ids=np.zeros_like(input_ids))
        for name in ("start_logits", "end_logits"):
            assert_close(result[name][context], expected[name][0, context], atol=ATOL)
            assert distance(other_types[name][0, context], expected[name][0, context]) > 0.01


def test_types_that_a_caller_leaves_out_are_those_that_hugging_face_finds(tiny_bundles) -> None:
    bundle = tiny_bundles("big_bird", "question-answering")
    input_ids = np.random.default_rng(0).integers(SEPARATOR_ID + 1, VOCAB_SIZE, (4, LIMIT + 5))
    for row, places in enumerate(([9, 30], [0], [LIMIT + 4], [])):
        input_ids[row, places] = SEPARATOR_ID
    got, expected = bundle.session(input_ids=input_ids), bundle.hugging_face(input_ids, np.ones_like(input_ids))
    given = bundle.session(input_ids=input_ids, token_type_ids=np.zeros_like(input_ids))
    for name in ("start_logits", "end_logits"):
        kept = expected[name] > -9e5
        assert_close(got[name][kept], expected[name][kept], atol=ATOL)
        assert distance(given[name][kept], expected[name][kept]) > 0.01


@torch.inference_mode()
def test_question_answering_stays_finite_in_float16_whose_range_ends_before_a_million(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "big_bird", Task.QUESTION_ANSWERING)
    model, family = find_checkpoint(tmp_path).load(Task.QUESTION_ANSWERING), family_of("big_bird")
    cast_model(model, "float16")
    BlockConversion(is_native=True, record=family.native_record("blocks", model.config)).adapt(model, family)
    ids = ids_of(LIMIT + 5).clamp(min=SEPARATOR_ID + 1)
    ids[0, 9] = SEPARATOR_ID
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=ids % 2).start_logits
    assert logits.isfinite().all()
    assert (logits[0, 1:10] < -9e5).all()


def test_question_answering_without_a_known_separator_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "big_bird", Task.QUESTION_ANSWERING, sep_token_id=None)
    with pytest.raises(ModelError, match=r"no sep_token_id, .* exclude the question.*\nAdd it: .*\"sep_token_id\": 66"):
        build(BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", max_len=100))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@torch.inference_mode()
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_dense_checkpoint_stays_dense_at_every_length(tmp_path: Path, model_type: str) -> None:
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION, attention_type="original_full")
    family = family_of(model_type)
    expected, got = (find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION) for _ in range(2))
    assert family.native_record("blocks", expected.config) is None
    family.as_trained(expected)
    family.adapt(got)
    for _, _, *pair in cases((LIMIT, LIMIT + 5)):
        ids, mask = map(torch.from_numpy, pair)
        answers = (model(input_ids=ids, attention_mask=mask).last_hidden_state[mask == 1] for model in (got, expected))
        assert_close(*(values.numpy() for values in answers), atol=ATOL)


def test_a_checkpoint_that_hugging_face_cannot_run_is_refused() -> None:
    config = transformers.BigBirdConfig(num_random_blocks=0)
    with pytest.raises(ModelError, match=r"num_random_blocks 0, .* of more than 320 tokens.*\nSet it to 1 or more"):
        family_of("big_bird").native_record("blocks", config)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_graph_has_one_node_per_layer_and_only_operators_of_tensorrt(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    assert bundle.manifest.operators == {"hdexport::BlockSparseAttention": 2}
    assert recorded(bundle.manifest, "blocks") == BlockSparse(
        pattern=Pattern.BIGBIRD,
        block_size=BLOCK_SIZE,
        mode=Mode.HF_EVAL,
        random_blocks=RANDOM_BLOCKS,
        global_tokens=0,
        last_block=LastBlock.PADDED,
        dense_tokens=LIMIT,
        converted=False,
    )
    assert bundle.manifest.padding == PaddingRule(multiple_of=BLOCK_SIZE, free_up_to=LIMIT)
    operators = [node.op_type for node in bundle.graph.graph]
    assert sum(name.startswith("BlockSparseAttention") for name in operators) == 2
    assert not {"NonZero", "Compress", "Unique", "ScatterND", "If", "Loop", "Softmax"} & {*operators}
    # Positions are a slice of the table; Hugging Face's padding to blocks is not there, nor is its GELU in eight steps.
    assert (operators.count("Slice"), operators.count("Pad")) == (1, 0)
    assert (operators.count("Gelu"), operators.count("Tanh"), operators.count("Pow")) == (2, 0, 0)


def test_an_extended_pegasus_has_as_many_positions_in_its_decoder(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    model = save_tiny_model(before, "bigbird_pegasus", Task.FEATURE_EXTRACTION)
    extend(ExtendOptions(model=before, output=after, max_len=2 * BASE, scheme=Scheme.TILE))
    extended = transformers.BigBirdPegasusModel.from_pretrained(after)
    for part in ("encoder", "decoder"):
        rows, original = (getattr(each, part).embed_positions.weight for each in (extended, model))
        assert torch.equal(rows, torch.cat([original] * 2))
