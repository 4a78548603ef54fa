"""Every family and task answers as Hugging Face does, at every length, batch and padding, in both graphs."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.families import SUPPORTED_MODEL_TYPES, Family, family_of
from hdexport.model.tasks import Task
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import ModelError
from support.comparators import assert_close, assert_same_directions, named_case
from support.grids import TASKS_OF_EVERY_RUN, nightly_unless
from support.hugging_face import HuggingFace, first_real_tokens
from support.padded_batches import batches, cases
from support.tiny_models import COPIES, PAD_TOKEN_ID, VOCAB_SIZE, WINDOWS

# The checkpoints have 64 positions, the bundles 300; 211 is a prime.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 211, 300)

HEAD_LENGTHS = (1, 65, 300)
"""Of other tasks than feature extraction, whose graphs are a head on the same encoder, and of other precisions."""

# Twenty times the largest error measured, 4e-6, and a fifth of what is promised.
ATOL = 2e-5
COSINE = 0.999


def is_block_sparse(family: Family) -> bool:
    return family.own is not None and family.own.kind == "blocks"


BLOCK_SPARSE = [name for name in SUPPORTED_MODEL_TYPES if is_block_sparse(family_of(name))]
"""Model types whose answers depend on the padding, as Hugging Face has it; test_big_bird.py has more of them."""

DISTINCT_TASKS = {
    # The head's pooling is ours.
    ("modernbert", "text-classification"),
    # The question is global, and not the first token alone.
    ("longformer", "question-answering"),
}
"""Tasks of other families that every run tries. The rest is Hugging Face's heads on encoders that are tried alone."""

TASKS_OF_MODEL_TYPE = [
    nightly_unless(
        task is Task.FEATURE_EXTRACTION
        or task.value in TASKS_OF_EVERY_RUN.get(name, ())
        or (name, task.value) in DISTINCT_TASKS,
        name,
        task.value,
    )
    for name in SUPPORTED_MODEL_TYPES
    for task in Task
    if task in (family_of(name).tasks or Task) and (name not in BLOCK_SPARSE or task is Task.FEATURE_EXTRACTION)
]


def real(values: np.ndarray, attention_mask: np.ndarray, *, has_tokens_axis: bool) -> np.ndarray:
    """The values that mean something: those of real tokens, or one a row."""
    return values[attention_mask == 1] if has_tokens_axis else values


@pytest.mark.parametrize(("model_type", "task"), TASKS_OF_MODEL_TYPE)
def test_both_graphs_answer_as_hugging_face(tiny_bundles, model_type: str, task: str) -> None:
    bundle = tiny_bundles(model_type, task)
    whole = task == Task.FEATURE_EXTRACTION
    grid = cases(HEAD_LENGTHS, sizes=(3,))
    if whole:
        grid = itertools.chain(cases(LENGTHS, sizes=(3,)), cases(HEAD_LENGTHS, sizes=(1,)))
    for tokens, name, input_ids, attention_mask in grid:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        others = other_inputs(bundle.manifest, input_ids, attention_mask)
        expected = bundle.hugging_face(**inputs, **others)
        for graph, run in (("portable", bundle.portable), ("session", bundle.session)):
            got = run(**inputs, **others)
            with named_case(graph, f"{tokens} tokens", name):
                assert set(got) == set(expected)
                for spec in bundle.manifest.outputs:
                    pair = (
                        real(values[spec.name], attention_mask, has_tokens_axis="tokens" in spec.shape)
                        for values in (got, expected)
                    )
                    assert got[spec.name].dtype == np.float32
                    assert_close(*pair, atol=ATOL)


@pytest.mark.parametrize(
    ("model_type", "precision"),
    # What bfloat16 changes does not depend on the family, but for the bias of MPNet's scores. Blocks in float16 are in
    # test_converted_blocks.py.
    [nightly_unless(name in ("bert", "mpnet"), name, "float16") for name in SUPPORTED_MODEL_TYPES if name not in COPIES]
    + [nightly_unless(name == "mpnet", name, "bfloat16") for name in ("bert", "roberta", "mpnet")],
)
def test_half_precision_points_where_hugging_face_does(tiny_bundles, model_type: str, precision: str) -> None:
    # Half precision changes all windows alike, and layers that are alike are traced once.
    changes = {"attention_window": [WINDOWS[0]] * 2} if model_type in ("led", "longformer") else {}
    bundle = tiny_bundles(model_type, precision=precision, **changes)
    # ONNX Runtime has no bfloat16 on a CPU; the lowered graph computes in float32 from bfloat16 weights.
    runs = [bundle.session] if precision == "bfloat16" else [bundle.portable, bundle.session]
    for tokens, name, input_ids, attention_mask in cases(HEAD_LENGTHS, sizes=(3,)):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        others = other_inputs(bundle.manifest, input_ids, attention_mask)
        expected = bundle.hugging_face(**inputs, **others)["last_hidden_state"][attention_mask == 1]
        for run in runs:
            got = run(**inputs, **others)["last_hidden_state"]
            with named_case(f"{tokens} tokens", name):
                assert got.dtype == np.float32
                assert_same_directions(got[attention_mask == 1], expected, cosine=COSINE)


@pytest.mark.parametrize(("model_type", "other"), COPIES.items())
def test_a_copy_of_a_family_has_its_graph(tiny_bundles, model_type: str, other: str) -> None:
    """Node for node, with weights of the same types and shapes."""
    graphs = [tiny_bundles(name).graph.graph for name in (model_type, other)]
    of_copy, of_other = (list(map(described, graph.all_nodes())) for graph in graphs)
    assert len(of_copy) > 60
    assert of_copy == of_other
    assert of_copy != list(map(described, tiny_bundles("bert").graph.graph.all_nodes()))


def described(node: ir.Node) -> tuple[object, ...]:
    """What a node does, and to what, but for the values of weights."""
    attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
    inputs = [
        None if value is None else (value.name, value.dtype, str(value.shape), value.is_initializer())
        for value in node.inputs
    ]
    return node.domain, node.op_type, attributes, inputs, [value.name for value in node.outputs]


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_what_stands_in_the_padding_does_not_change_the_answer(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    generator = np.random.default_rng(0)
    input_ids = generator.integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, 129))
    attention_mask = (np.arange(129) < 65).astype(np.int64)[None]
    answers = []
    for filler in (PAD_TOKEN_ID, 7, VOCAB_SIZE - 1):
        ids = np.where(attention_mask == 1, input_ids, filler)
        inputs = {spec.name: np.zeros_like(ids) for spec in bundle.manifest.inputs}
        inputs |= {"input_ids": ids, "attention_mask": attention_mask}
        answers.append(bundle.portable(**inputs)["last_hidden_state"][:, :65])
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_a_row_of_nothing_but_padding_disturbs_no_other(tiny_bundles, model_type: str, padding: str) -> None:
    check_a_row_of_padding(tiny_bundles(model_type), padding)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(
    ("model_type", "precision", "global_tokens"), [("roberta", "float32", 40), ("bert", "float16", 5)]
)
def test_a_row_of_nothing_but_padding_disturbs_no_other_in_windows(
    tiny_bundles, model_type: str, precision: str, global_tokens: int, padding: str
) -> None:
    attention = f"window:16,global:{global_tokens}"
    check_a_row_of_padding(tiny_bundles(model_type, precision=precision, attention=attention), padding)


def check_a_row_of_padding(bundle, padding: str) -> None:
    """Rows beside one without any real token answer as they do alone, and nothing is NaN."""
    real = np.arange(129) < 65 if padding == "right" else np.arange(129) >= 64
    attention_mask = np.stack([np.zeros(129, bool), real]).astype(np.int64)
    ids = np.random.default_rng(3).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, attention_mask.shape)
    input_ids = np.where(attention_mask == 1, ids, PAD_TOKEN_ID)
    for run in (bundle.portable, bundle.session):
        both, alone = (
            run(**inputs, **other_inputs(bundle.manifest, inputs["input_ids"], inputs["attention_mask"]))
            for inputs in (
                {"input_ids": input_ids, "attention_mask": attention_mask},
                {"input_ids": input_ids[1:], "attention_mask": attention_mask[1:]},
            )
        )
        assert np.isfinite(both["last_hidden_state"]).all()
        atol = ATOL if bundle.manifest.dtype == "float32" else 1e-2
        assert_close(both["last_hidden_state"][1, real], alone["last_hidden_state"][0, real], atol=atol)


@pytest.mark.parametrize("model_type", [name for name in SUPPORTED_MODEL_TYPES if name not in BLOCK_SPARSE])
def test_a_row_answers_the_same_in_any_batch(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    _, input_ids, attention_mask = next(batch for batch in batches(129) if batch[0] == "padding on the right, batch 3")
    together = bundle.session(input_ids=input_ids, attention_mask=attention_mask)["last_hidden_state"]
    for row, real_tokens in enumerate(attention_mask.sum(axis=1)):
        alone = bundle.session(input_ids=input_ids[row : row + 1, :real_tokens])["last_hidden_state"][0]
        assert_close(together[row, :real_tokens], alone, atol=ATOL)


@pytest.mark.parametrize("model_type", [name for name in SUPPORTED_MODEL_TYPES if family_of(name).learned_positions])
def test_one_token_more_than_the_table_is_an_error_and_no_answer(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    input_ids = np.full((1, bundle.manifest.max_len + 1), 5)
    inputs = {spec.name: np.zeros_like(input_ids) for spec in bundle.manifest.inputs}
    inputs |= {"input_ids": input_ids, "attention_mask": np.ones_like(input_ids)}
    with pytest.raises(Exception, match=r"(?i)invalid|out of (data )?bounds|broadcast"):
        bundle.portable(**inputs)
    with pytest.raises(ValueError, match="--max-len 301"):
        bundle.session(input_ids=input_ids)


@pytest.mark.parametrize("model_type", ["camembert", "longformer", "mpnet", "roberta", "xlm-roberta"])
def test_padding_ids_inside_a_text_count_no_position(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    input_ids = np.random.default_rng(1).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (2, 129))
    input_ids[0, 3:9] = PAD_TOKEN_ID
    input_ids[1, [0, 64, 128]] = PAD_TOKEN_ID
    attention_mask = np.ones_like(input_ids)
    expected = bundle.hugging_face(input_ids, attention_mask)["last_hidden_state"]
    others = other_inputs(bundle.manifest, input_ids, attention_mask)
    for run in (bundle.portable, bundle.session):
        got = run(input_ids=input_ids, attention_mask=attention_mask, **others)["last_hidden_state"]
        assert_close(got, expected, atol=ATOL)


@pytest.mark.parametrize(
    ("model_type", "max_len"),
    [("bert", 1), nightly_unless(False, "bert", 2), nightly_unless(False, "roberta", 1), ("roberta", 63)],
)
def test_a_cut_table_serves_every_length_it_has(tiny_bundles, model_type: str, max_len: int) -> None:
    bundle = tiny_bundles(model_type, max_len=max_len)
    for tokens, name, input_ids, attention_mask in cases({1, max_len // 2, max_len} - {0}):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        others = other_inputs(bundle.manifest, input_ids, attention_mask)
        expected = bundle.hugging_face(**inputs, **others)["last_hidden_state"]
        for run in (bundle.portable, bundle.session):
            got = run(**inputs, **others)["last_hidden_state"]
            with named_case(f"{tokens} tokens", name):
                assert_close(got[attention_mask == 1], expected[attention_mask == 1], atol=ATOL)


VARIANTS = {
    "ernie with task types": ("ernie", {"use_task_id": True, "task_type_vocab_size": 3}),
    "albert with layers in groups": ("albert", {"num_hidden_groups": 2, "inner_group_num": 2}),
    "electra with wide embeddings": ("electra", {"embedding_size": 32}),
    "distilbert with sinusoidal positions": ("distilbert", {"sinusoidal_pos_embds": True}),
    "bert of one head and one token type, with relu": (
        "bert",
        {"num_attention_heads": 1, "type_vocab_size": 1, "hidden_act": "relu"},
    ),
    "mpnet of other buckets": ("mpnet", {"relative_attention_num_buckets": 40}),
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    # The nightly ones are modules of the library that no pass of ours looks at.
    [
        nightly_unless(name not in ("electra with wide embeddings", "distilbert with sinusoidal positions"), *variant)
        for name, variant in VARIANTS.items()
    ],
    ids=VARIANTS,
)
def test_variants_of_a_family_answer_as_hugging_face(tiny_bundles, model_type: str, changes: dict[str, object]) -> None:
    bundle = tiny_bundles(model_type, **changes)
    for tokens, name, input_ids, attention_mask in cases((1, 65, 300), sizes=(3,)):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        expected = bundle.hugging_face(**inputs)["last_hidden_state"]
        got = bundle.session(**inputs)["last_hidden_state"]
        with named_case(f"{tokens} tokens", name):
            assert_close(got[attention_mask == 1], expected[attention_mask == 1], atol=ATOL)


def test_the_reference_sees_positions(tiny_bundles) -> None:
    """Were all positions alike to the tiny models, these tests could not tell a wrong table from a right one."""
    bundle = tiny_bundles("bert")
    other = HuggingFace(bundle.checkpoint, "feature-extraction", max_len=300, alpha=0.3)
    _, input_ids, attention_mask = next(batches(65))
    right = bundle.hugging_face(input_ids, attention_mask)["last_hidden_state"]
    wrong = other(input_ids, attention_mask)["last_hidden_state"]
    assert np.abs(right - wrong).max() > 100 * ATOL


def test_an_unsupported_type_lists_those_there_are() -> None:
    with pytest.raises(ModelError, match=r"'gpt2' is not supported.\nSupported: albert, bert, .*xlm-roberta"):
        family_of("gpt2")


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_the_registry_and_the_families_agree(model_type: str) -> None:
    assert model_type in family_of(model_type).model_types


def other_inputs(manifest: Manifest, input_ids: np.ndarray, attention_mask: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs besides the ids and their mask, for bundles that have them: name -> int64 [batch, tokens]."""
    values = {"token_type_ids": input_ids % 2, "global_attention_mask": first_real_tokens(attention_mask)}
    return {spec.name: values[spec.name] for spec in manifest.inputs if spec.name in values}
