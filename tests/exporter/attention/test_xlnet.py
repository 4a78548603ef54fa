"""XLNet answers as Hugging Face does, segment after segment, with what it remembers; wrong memories are found.

One bundle looks both ways; one is causal, clamps distances and has a memory as long as a document; a classifier
remembers a part of each segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

import hdruntime
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.task_formats import format_of
from hdruntime.bundle.verification import SkipCause
from hdruntime.errors import InputError, ModelError
from support.attention_records import recorded
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.tampered_bundles import tampered
from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, save_tiny_model
from support.verified import verified

MEMORY, LONG_MEMORY = 20, 100
SEGMENTS = (33, 7, 1, 64, 20)
"""Tokens: longer than the memory of 20, shorter, a single one, as many. All together fill the memory of 100, too."""

ATOL = 2e-5

BOTH_WAYS: dict[str, Any] = {"mem_len": MEMORY}
CAUSAL: dict[str, Any] = {"mem_len": LONG_MEMORY, "attn_type": "uni", "clamp_len": 11}
CLASSIFIER: dict[str, Any] = {"mem_len": MEMORY, "reuse_len": 5}
"""Remembers a part of each segment."""

VARIANTS = {"both ways": BOTH_WAYS, "causal, clamped": CAUSAL, "a part of each segment": CLASSIFIER}


def segments(batch: int) -> list[dict[str, np.ndarray]]:
    """Ids and types of tokens, [batch, tokens], of one segment after the other."""
    generator = np.random.default_rng(batch)
    return [
        {
            "input_ids": generator.integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (batch, tokens)),
            "token_type_ids": generator.integers(0, 3, (batch, tokens)),
        }
        for tokens in SEGMENTS
    ]


def streamed_by_hugging_face(
    model: Any, feeds: list[dict[str, np.ndarray]]
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """The hidden states of each segment, and the memory after it: [batch, tokens, hidden] each."""
    found, memory = [], None
    for segment in feeds:
        given = {name: torch.from_numpy(values) for name, values in segment.items()}
        with torch.inference_mode():
            output = model(**given, mems=memory, use_mems=True)
        memory = output.mems
        found.append((output.last_hidden_state.numpy(), [layer.transpose(0, 1).numpy() for layer in memory]))
    return found


def in_turn(bundle: Any, feeds: Sequence[Mapping[str, np.ndarray]], *, graph: str = "session") -> Iterator[dict]:
    """What a graph answers to one batch after the other, each of which is given what the one before has left."""
    (batch, _), run = feeds[0]["input_ids"].shape, getattr(bundle, graph)
    # Nothing is remembered, in as much memory as there may be.
    carried = {
        spec.name: np.zeros([batch, bundle.manifest.max_memory, *spec.shape[2:]], np.float32)
        for spec in bundle.manifest.recurrent_states
    }
    for given in feeds:
        got = run(**{"attention_mask": np.ones_like(given["input_ids"]), **given, **carried})
        carried = {spec.name: got[spec.fed_from] for spec in bundle.manifest.recurrent_states}
        yield got


def assert_segments_answer_as_hugging_face(bundle: Any, most: int, batch: int, graphs: Sequence[str]) -> None:
    feeds = segments(batch)
    expected = streamed_by_hugging_face(bundle.hugging_face.model, feeds)
    for graph in graphs:
        for number, (got, (states, left)) in enumerate(zip(in_turn(bundle, feeds, graph=graph), expected, strict=True)):
            with named_case(graph, f"segment {number}"):
                assert_close(got["last_hidden_state"], states, atol=ATOL)
                for layer, memory in enumerate(left):
                    there = memory.shape[1]
                    assert_close(got[f"new_mems.{layer}"][:, most - there :], memory, atol=ATOL)
                    mask = np.broadcast_to(np.arange(most) >= most - there, (batch, most))
                    np.testing.assert_array_equal(got["new_mems.mask"], mask)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "changes", [nightly_unless(changes is BOTH_WAYS, changes) for changes in VARIANTS.values()], ids=VARIANTS
)
def test_segments_answer_as_hugging_face_with_what_is_remembered(tiny_bundles, changes: dict, batch: int) -> None:
    bundle = tiny_bundles("xlnet", **changes)
    assert_segments_answer_as_hugging_face(bundle, changes["mem_len"], batch, ("portable", "session"))


@pytest.mark.parametrize("changes", [CAUSAL, CLASSIFIER], ids=str)
def test_what_is_traced_answers_segments_as_hugging_face(traced_models, changes: dict) -> None:
    assert_segments_answer_as_hugging_face(traced_models("xlnet", **changes), changes["mem_len"], 3, ["traced"])


def test_a_larger_memory_remembers_more(tiny_bundles) -> None:
    """The same segments with less remembered answer otherwise: the test above would find a memory that is ignored."""
    feeds = segments(1)
    model = tiny_bundles("xlnet", **BOTH_WAYS).hugging_face.model
    expected = streamed_by_hugging_face(model, feeds)
    alone = [streamed_by_hugging_face(model, [segment])[0][0] for segment in feeds]
    assert np.abs(alone[0] - expected[0][0]).max() < ATOL
    for of_stream, of_text in zip(expected[1:], alone[1:], strict=True):
        assert np.abs(of_stream[0] - of_text).max() > 100 * ATOL


def test_a_memory_is_asked_for_where_a_checkpoint_has_none(tiny_bundles, traced_models) -> None:
    carried = traced_models("xlnet", recurrence=12).manifest.recurrent_states
    assert [spec.name for spec in carried] == ["mems.0", "mems.1", "mems.mask"]
    assert {spec.bound for spec in carried} == {12}
    plain = tiny_bundles("xlnet").manifest
    assert (recorded(plain, "relative").memory, plain.recurrent_states) == (0, ())


@pytest.mark.parametrize(
    "backend", [nightly_unless(name == "onnxruntime", name) for name in ("onnxruntime", "openvino")]
)
def test_token_types_are_compared_whatever_their_numbers(tiny_bundles, openvino_bundles, backend: str) -> None:
    bundle = (tiny_bundles if backend == "onnxruntime" else openvino_bundles)("xlnet")
    ids = np.arange(5, 9)[None]
    with hdruntime.load(bundle.path, backend, threads=1) as session:
        one_apart, few, same = (
            session(input_ids=ids, token_type_ids=[types])["last_hidden_state"]
            for types in ([2**24 - 2, 2**24 - 2, 2**24 - 1, 2**24 - 1], [0, 0, 1, 1], [0, 0, 0, 0])
        )
        np.testing.assert_array_equal(one_apart, few)
        assert np.abs(few - same).max() > 100 * ATOL
        with pytest.raises(InputError, match=r"token_type_ids\[0, 3\] is 16777216; the model has 16777216 token types"):
            session(input_ids=ids, token_type_ids=[[0, 0, 0, 2**24]])


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["transfo-xl", "xlnet"])
def test_a_segment_may_be_of_a_single_token(tiny_bundles, model_type: str) -> None:
    """The bundle takes no longer segments; what is remembered has many tokens."""
    bundle = tiny_bundles(model_type, mem_len=MEMORY, max_len=1)
    assert recorded(bundle.manifest, "relative").memory == MEMORY
    found = verified(bundle)
    assert found.passed
    assert {check.case.tokens for check in found.checks} == {1}


@pytest.mark.parametrize("memory", [1, MEMORY])
def test_an_empty_memory_of_any_size_is_no_memory(tiny_bundles, memory: int) -> None:
    bundle, plain = tiny_bundles("xlnet", **BOTH_WAYS), tiny_bundles("xlnet")
    (segment, *_) = segments(3)
    feeds = segment | {"attention_mask": np.ones_like(segment["input_ids"])}
    generator = np.random.default_rng(0)
    carried = {
        # Whatever is not there must not matter.
        spec.name: np.zeros((3, memory), np.float32)
        if spec.name == "mems.mask"
        else generator.normal(size=(3, memory, 32)).astype(np.float32)
        for spec in bundle.manifest.recurrent_states
    }
    for graph in ("portable", "session"):
        got = getattr(bundle, graph)(**feeds, **carried)["last_hidden_state"]
        assert_close(got, getattr(plain, graph)(**feeds)["last_hidden_state"], atol=ATOL)


def test_a_document_in_one_segment_is_the_document_in_chunks_where_tokens_see_earlier_ones_only(traced_models) -> None:
    """With a memory of all earlier segments, and no token that sees what is behind it."""
    bundle = traced_models("xlnet", **CAUSAL)
    ids = np.random.default_rng(1).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (2, 128))
    parts = [{"input_ids": ids[:, start:end]} for start, end in ((0, 50), (50, 51), (51, 100), (100, 128))]
    whole, in_chunks = (
        np.concatenate([got["last_hidden_state"] for got in in_turn(bundle, each, graph="traced")], axis=1)
        for each in ([{"input_ids": ids}], parts)
    )
    assert_close(in_chunks, whole, atol=ATOL)


@pytest.mark.parametrize(
    "changes", [nightly_unless(changes is BOTH_WAYS, changes) for changes in VARIANTS.values()], ids=VARIANTS
)
def test_streams_of_interleaved_documents_answer_as_hugging_face(tiny_bundles, changes: dict) -> None:
    bundle = tiny_bundles("xlnet", **changes)
    generator = np.random.default_rng(3)
    documents = [generator.integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, tokens) for tokens in (70, 5, 16, 33, 90)]
    found: dict[int, list[np.ndarray]] = {}
    for part in bundle.session.stream_all(documents, segment=16, rows=2):
        found.setdefault(part.document, []).append(part.outputs["last_hidden_state"])
    for number, ids in enumerate(documents):
        feeds = [{"input_ids": ids[None, start : start + 16]} for start in range(0, len(ids), 16)]
        expected = streamed_by_hugging_face(bundle.hugging_face.model, feeds)
        assert_close(np.concatenate(found[number]), np.concatenate([states[0] for states, _ in expected]), atol=ATOL)


def test_padding_behind_a_text_is_not_remembered(tiny_bundles) -> None:
    """Each row leaves what its text alone leaves; one of padding leaves what there was."""
    bundle = tiny_bundles("xlnet", **BOTH_WAYS)
    first, second = segments(3)[:2]
    mask = np.ones_like(first["input_ids"])
    mask[0, 11:], mask[1, :] = 0, 0
    for run in (bundle.portable, bundle.session):
        empty = {
            spec.name: np.zeros([3, MEMORY, *spec.shape[2:]], np.float32) for spec in bundle.manifest.recurrent_states
        }
        before = run(**second, attention_mask=np.ones_like(second["input_ids"]), **empty)
        carried = {spec.name: before[spec.fed_from] for spec in bundle.manifest.recurrent_states}
        after = run(**first, attention_mask=mask, **carried)
        for row, tokens in enumerate((11, 0, mask.shape[1])):
            alone = {name: values[row : row + 1, : max(tokens, 1)] for name, values in first.items()}
            remembered = {name: values[row : row + 1] for name, values in carried.items()}
            expected = run(**alone, attention_mask=np.ones_like(alone["input_ids"]), **remembered)
            for spec in bundle.manifest.recurrent_states:
                left = expected[spec.fed_from] if tokens else remembered[spec.name]
                assert_close(after[spec.fed_from][row : row + 1], left, atol=ATOL)


@pytest.mark.parametrize("task", ["text-classification", "question-answering"])
def test_other_tasks_remember_too(traced_models, task: str) -> None:
    bundle = traced_models("xlnet", task, **CLASSIFIER)
    model, memory = bundle.hugging_face.model, None
    feeds = segments(3)
    for segment, got in zip(feeds, in_turn(bundle, feeds, graph="traced"), strict=True):
        with torch.inference_mode():
            expected = model(
                **{name: torch.from_numpy(values) for name, values in segment.items()}, mems=memory, use_mems=True
            )
        memory = expected.mems
        for name in format_of(task).output_axes:
            assert_close(got[name], expected[name].numpy(), atol=ATOL)


@pytest.mark.parametrize(
    # The last token's is the default.
    "changes",
    [CLASSIFIER, *(nightly_unless(False, {"summary_type": summary}) for summary in ("mean", "first"))],
    ids=str,
)
def test_summaries_of_texts_are_of_real_tokens(tiny_bundles, changes: dict[str, Any]) -> None:
    bundle = tiny_bundles("xlnet", "text-classification", **changes)
    ids = np.random.default_rng(2).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, 40))
    alone = bundle.hugging_face.model(input_ids=torch.from_numpy(ids)).logits.detach().numpy()
    padded = np.concatenate([ids, np.full((1, 9), 5)], axis=1)
    mask = (np.arange(49) < 40).astype(np.int64)[None]
    for graph in ("portable", "session"):
        feeds = {"input_ids": padded, "attention_mask": mask, "token_type_ids": np.zeros_like(padded)}
        carried = {
            spec.name: np.zeros([1, 1, *spec.shape[2:]], np.float32) for spec in bundle.manifest.recurrent_states
        }
        assert_close(getattr(bundle, graph)(**feeds, **carried)["logits"], alone, atol=ATOL)


def test_what_cannot_be_built_is_refused(tiny_bundles) -> None:
    for name in ("same_length", "bi_data"):
        with pytest.raises(ModelError, match=f"{name} True; False can be built"):
            tiny_bundles("xlnet", mem_len=MEMORY, **{name: True})


def test_masks_cannot_be_filled(tiny_bundles) -> None:
    checkpoint = find_checkpoint(tiny_bundles("xlnet").checkpoint)
    with pytest.raises(
        ModelError, match=r"fill-mask of a xlnet is not supported(.|\n)*second stream(.|\n)*task=.feature"
    ):
        checkpoint.load(Task.FILL_MASK)


def test_a_verification_remembers_texts_and_compares_what_is_left(tiny_bundles) -> None:
    found = verified(tiny_bundles("xlnet", **BOTH_WAYS))
    assert found.passed
    assert len(found.checks) > 12
    assert {"new_mems.0", "new_mems.mask"} <= set(found.checks[0].outputs)


def test_a_classifier_is_verified_with_padding_on_the_left_which_it_was_trained_with(tiny_bundles) -> None:
    """Hugging Face's reads the last token of a row, and no family's but XLNet's does."""
    found = verified(tiny_bundles("xlnet", "text-classification", **CLASSIFIER))
    assert found.passed
    assert "left" in {check.case.padding for check in found.checks}
    assert SkipCause.LEFT_PADDING not in {skip.cause for skip in found.skipped}


def test_a_verification_finds_a_memory_of_the_wrong_layer(tiny_bundles, tmp_path) -> None:
    def change(model: ir.Model) -> None:
        one, other = (next(value for value in model.graph.inputs if value.name == f"mems.{layer}") for layer in (0, 1))
        other.replace_all_uses_with(one)

    bundle = tiny_bundles("xlnet", **BOTH_WAYS)
    assert not verified(bundle, tampered(bundle, tmp_path / "wrong", change, "model.onnx")).passed


def test_texts_and_pairs_have_the_types_of_the_librarys_tokenizer(tmp_path: Path) -> None:
    """The last token, <cls>, has a type of its own."""
    save_tiny_model(tmp_path / "model", "xlnet", Task.TEXT_CLASSIFICATION)
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    words = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", *(f"▁w{number}" for number in range(90))]
    tokenizer = transformers.XLNetTokenizer(
        vocab=[(word, -float(number)) for number, word in enumerate(words)],
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(tmp_path / "model")
    build(BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", max_len=64, verify=None))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with hdruntime.load(tmp_path / "bundle", "onnxruntime", threads=1) as session:
        for texts in (("w3 w4 w5",), ("w3 w4 w5", "w6 w7"), ("", "w8")):
            with named_case(texts):
                expected = tokenizer(*([text] for text in texts), return_tensors="pt")
                (encoding,) = session.tokenize(*([text] for text in texts))
                assert [*encoding.types] == expected["token_type_ids"][0].tolist()
                assert encoding.types[-1] == 2
                with torch.inference_mode():
                    logits = model(**expected).logits[0].numpy()
                assert_close(session.infer([encoding])[0]["logits"], logits, atol=ATOL)
