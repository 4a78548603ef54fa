"""Longformer and LED's encoder answer as Hugging Face does: windows, global tokens, their defaults, both graphs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hdexport.attention.attention_type import ConversionContext
from hdexport.attention.registry import attention_conversions, attention_from_spec
from hdexport.checkpoint import find_checkpoint
from hdexport.families import family_of
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Role, Task
from hdruntime.errors import InputError, ModelError
from support.answers import ATOL, assert_answers
from support.attention_records import recorded
from support.comparators import assert_close
from support.padded_batches import batches, cases
from support.tiny_models import (
    BASE,
    MANY_GLOBAL_TOKENS,
    PAD_TOKEN_ID,
    SEPARATOR_ID,
    VOCAB_SIZE,
    WINDOWS,
    save_tiny_model,
)

# The tiny layers see 4 and 8 tokens on each side. Around these and around twice them, around Hugging Face's padding to
# 16, around the checkpoint's 64 positions; 211 is a prime.
LENGTHS = (1, 4, 5, 9, 16, 17, 65, 211, 300)

FEW: dict[str, Any] = {}
"""The default bound of global tokens, 16, is below that at which the rows' projections move."""

each_bundle = pytest.mark.parametrize(
    ("model_type", "options"), [("led", FEW), ("longformer", FEW), ("longformer", MANY_GLOBAL_TOKENS)]
)


def scattered(attention_mask: np.ndarray, count: int) -> np.ndarray:
    """int64 [batch, tokens]: up to `count` real tokens per row are marked, one fewer in each row, and all padding."""
    generator = np.random.default_rng(count)
    marks = 1 - attention_mask
    for row, (mark, real) in enumerate(zip(marks, attention_mask, strict=True)):
        places = np.flatnonzero(real)
        mark[generator.choice(places, min(max(count - row, 0), len(places)), replace=False)] = 1
    return marks


@each_bundle
def test_both_graphs_answer_as_hugging_face(tiny_bundles, model_type: str, options: dict[str, Any]) -> None:
    bundle = tiny_bundles(model_type, **options)
    # LED's layers are Longformer's, and many global tokens change no window.
    lengths = (1, 17, 65, 300) if model_type == "led" or options else LENGTHS
    for tokens, name, input_ids, attention_mask in cases(lengths, sizes=(3,)):
        for count in (0, 40) if options else (0, 5):
            feeds = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "global_attention_mask": scattered(attention_mask, count),
            }
            case = (f"{tokens} tokens", f"{count} global", name)
            assert_answers(bundle, feeds, bundle.hugging_face(**feeds), case=case)


def test_both_graphs_answer_as_hugging_face_at_4096_tokens(tiny_bundles) -> None:
    bundle = tiny_bundles("longformer", **MANY_GLOBAL_TOKENS)
    input_ids = np.random.default_rng(0).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (2, 4096))
    attention_mask = np.stack([np.arange(4096) < length for length in (4096, 4093)]).astype(np.int64)
    marks = scattered(attention_mask, 40)
    feeds = {"input_ids": input_ids, "attention_mask": attention_mask, "global_attention_mask": marks}
    assert_answers(bundle, feeds, bundle.hugging_face(**feeds))


def test_one_mark_fewer_or_elsewhere_is_seen(tiny_bundles) -> None:
    """Could these tests not tell one mask from another, they would prove nothing."""
    bundle = tiny_bundles("longformer")
    _, input_ids, attention_mask = next(batches(65))
    right = np.zeros_like(input_ids)
    right[:, [0, 40]] = 1
    expected = bundle.hugging_face(input_ids, attention_mask, global_attention_mask=right)
    for wrong_places in ([0], [0, 41]):
        wrong = np.zeros_like(input_ids)
        wrong[:, wrong_places] = 1
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask, "global_attention_mask": wrong}
        with pytest.raises(AssertionError, match=r"> 0.002"):
            assert_answers(bundle, feeds, expected, atol=100 * ATOL, graphs=["session"])


def test_projections_of_all_tokens_are_left_out_where_that_is_less_work(tiny_bundles) -> None:
    def weights(options: dict[str, Any]) -> set[str]:
        graph = tiny_bundles("longformer", **options).graph.graph
        return {str(name).rpartition("self.")[2] for name in graph.initializers if ".attention.self." in str(name)}

    assert {"key_weight", "value_weight", "value_bias"} <= weights(FEW)
    assert not any(name.startswith(("key_global", "value_global")) for name in weights(FEW))
    assert "key_weight" not in weights(MANY_GLOBAL_TOKENS)


@each_bundle
def test_the_graph_has_one_node_per_layer_and_only_operators_of_tensorrt(
    tiny_bundles, model_type: str, options: dict[str, Any]
) -> None:
    bundle = tiny_bundles(model_type, **options)
    nodes = list(bundle.graph.graph)
    bound = options.get("max_global", 16)
    assert [node.op_type for node in nodes if node.domain] == [f"SlidingWindowAttention_global{bound}"] * 2
    assert bundle.manifest.operators == {"hdexport::SlidingWindowAttention": 2}
    windows = options.get("attention_window", WINDOWS)
    assert recorded(bundle.manifest, "window").layers == tuple(window // 2 for window in windows)
    assert not {"NonZero", "Compress", "Unique", "ScatterND", "If", "Loop"} & {node.op_type for node in nodes}
    assert [spec.name for spec in bundle.manifest.inputs] == ["input_ids", "attention_mask", "global_attention_mask"]


def test_leds_positions_are_a_slice_of_the_table(tiny_bundles) -> None:
    graph = tiny_bundles("led").graph
    readers = [
        node.op_type for node in graph.graph for value in node.inputs if value and "positions" in str(value.name)
    ]
    assert readers == ["Slice"]


def own_answer(bundle: Any, input_ids: np.ndarray, attention_mask: np.ndarray) -> Any:
    """Hugging Face's, which marks tokens itself."""
    with torch.inference_mode():
        return bundle.hugging_face.model(torch.from_numpy(input_ids), torch.from_numpy(attention_mask))


def test_question_answering_marks_the_question_as_hugging_face_does(tiny_bundles) -> None:
    bundle = tiny_bundles("longformer", "question-answering")
    question = marked_input(Default(fill=Fill.UNTIL_TOKEN, token_id=SEPARATOR_ID), bound=64)
    assert bundle.manifest.input_of(Role.GLOBAL_ATTENTION_MASK) == question
    input_ids = np.random.default_rng(1).integers(SEPARATOR_ID + 1, VOCAB_SIZE, (3, 90))
    attention_mask = np.ones_like(input_ids)
    # Hugging Face wants exactly three separators, as <s> question </s></s> context </s> has.
    for row, (question, text) in enumerate(((5, 90), (64, 81), (1, 12))):
        input_ids[row, [question, question + 1, text - 1]] = SEPARATOR_ID
        input_ids[row, text:], attention_mask[row, text:] = PAD_TOKEN_ID, 0
    expected = own_answer(bundle, input_ids, attention_mask)
    got = bundle.session(input_ids=input_ids, attention_mask=attention_mask)
    for name in ("start_logits", "end_logits"):
        pair = (values[attention_mask == 1] for values in (got[name], expected[name].numpy()))
        assert_close(*pair, atol=ATOL)


def test_pairs_of_texts_answer_as_hugging_face(tiny_bundles) -> None:
    bundle = tiny_bundles("longformer", "question-answering")
    questions = ["w7 w8 w9", " ".join(f"w{index}" for index in range(60)), "w1"]
    contexts = ["w20 w21 w22 w23 w24", "w3", " ".join(f"w{index}" for index in range(90))]
    encodings = bundle.session.tokenize(questions, contexts)
    for encoding, result in zip(encodings, bundle.session.infer(encodings, batch_tokens=200), strict=True):
        input_ids = np.array([encoding.input_ids])
        marks = (np.arange(len(encoding)) < encoding.input_ids.index(SEPARATOR_ID)).astype(np.int64)[None]
        expected = bundle.hugging_face(input_ids, np.ones_like(input_ids), global_attention_mask=marks)
        for name in ("start_logits", "end_logits"):
            assert_close(result[name], expected[name][0], atol=ATOL)


def marked_input(default: Default, *, bound: int) -> InputSpec:
    """What the manifest says of the input by which callers mark tokens."""
    return InputSpec(
        name="global_attention_mask",
        dtype="int64",
        shape=("batch", "tokens"),
        role=Role.GLOBAL_ATTENTION_MASK,
        default=default,
        bound=bound,
    )


def inputs_of(
    model_type: str,
    config: transformers.PretrainedConfig,
    task: Task,
    *,
    max_global: int | None = None,
    max_len: int = 100,
) -> list[InputSpec]:
    """The inputs that the attention of a model of that configuration adds to its graph."""
    context = ConversionContext(
        model=SimpleNamespace(config=config), family=family_of(model_type), task=task, max_len=max_len
    )
    conversions = attention_conversions(attention_from_spec(None, {"max_global": max_global}), context)
    return [spec for conversion in conversions.values() for spec in conversion.inputs]


def test_the_defaults_by_task_and_family() -> None:
    config = transformers.LongformerConfig(sep_token_id=7)
    first, none = Default(fill=Fill.FIRST_TOKEN), Default(fill=Fill.ZEROS)
    assert inputs_of("longformer", config, Task.TEXT_CLASSIFICATION) == [marked_input(first, bound=16)]
    for task in set(Task) - {Task.QUESTION_ANSWERING, Task.TEXT_CLASSIFICATION}:
        assert inputs_of("longformer", config, task) == [marked_input(none, bound=16)]
    question = Default(fill=Fill.UNTIL_TOKEN, token_id=7)
    assert inputs_of("longformer", config, Task.QUESTION_ANSWERING) == [marked_input(question, bound=64)]
    led = transformers.LEDConfig()
    assert inputs_of("led", led, Task.FEATURE_EXTRACTION, max_global=3) == [marked_input(none, bound=3)]
    assert inputs_of("bert", transformers.BertConfig(), Task.FILL_MASK) == []


def test_no_more_tokens_can_be_marked_than_the_longest_text_has() -> None:
    """TensorRT builds no engine that overwrites more rows than there are."""
    config, none = transformers.LongformerConfig(), Default(fill=Fill.ZEROS)
    for max_global in (None, 13):
        assert inputs_of("longformer", config, Task.FILL_MASK, max_global=max_global, max_len=12) == [
            marked_input(none, bound=12)
        ]


def test_a_bound_that_does_not_fit_is_refused() -> None:
    for max_global in (0, 3841):
        with pytest.raises(InputError, match=rf"^max_global is {max_global}; it must be 1 to 3840\.$"):
            inputs_of("longformer", transformers.LongformerConfig(), Task.FILL_MASK, max_global=max_global)
    with pytest.raises(InputError, match=r"(?s)max_global=8 is for .*which albert does not have\.\nLeave it out"):
        inputs_of("albert", transformers.AlbertConfig(), Task.FILL_MASK, max_global=8)


def test_question_answering_without_a_known_separator_is_refused() -> None:
    config = transformers.LongformerConfig(sep_token_id=None)
    with pytest.raises(ModelError, match=r"(?s)no sep_token_id.*\nAdd it: .*\"sep_token_id\": 2"):
        inputs_of("longformer", config, Task.QUESTION_ANSWERING)


@pytest.mark.parametrize("architecture", ["LEDModel", "LEDForConditionalGeneration"])
def test_leds_encoder_is_taken_from_any_checkpoint_of_it(tmp_path: Path, architecture: str) -> None:
    model = save_tiny_model(tmp_path, "led", Task.FEATURE_EXTRACTION)
    if architecture != "LEDModel":
        full = transformers.LEDForConditionalGeneration(model.config)
        full.led.load_state_dict(model.state_dict())
        full.save_pretrained(tmp_path)
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.task() is Task.FEATURE_EXTRACTION
    assert checkpoint.base_positions == BASE
    encoder = checkpoint.load(Task.FEATURE_EXTRACTION)
    input_ids = torch.arange(5, 38)[None]
    with torch.inference_mode():
        expected = model.eval().encoder(input_ids).last_hidden_state
        assert_close(encoder(input_ids).last_hidden_state.numpy(), expected.numpy(), atol=1e-6)


def test_a_windowed_roberta_with_tiled_positions_is_longformers_initialisation(traced_models) -> None:
    """RoBERTa's weights, its positions over and over, global projections like the local ones (arXiv:2004.05150, 5)."""
    max_len, window = 4 * BASE, 6
    windowed = traced_models("roberta", max_len=max_len, attention=f"window:{window},global:1", scheme="tile")
    roberta = transformers.AutoModel.from_pretrained(windowed.checkpoint)
    longformer = _longformer_of_roberta(roberta, max_len=max_len, window=window)
    for tokens in (window, 65, max_len):
        input_ids = np.random.default_rng(tokens).integers(5, VOCAB_SIZE, (2, tokens))
        attention_mask, marks = np.ones_like(input_ids), np.zeros_like(input_ids)
        attention_mask[1, 2 * tokens // 3 :] = 0
        marks[:, 0] = 1
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask}
        got = windowed.traced(**feeds)["last_hidden_state"]
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(ids) for name, ids in (feeds | {"global_attention_mask": marks}).items()}
            expected = longformer(**tensors).last_hidden_state.numpy()
        assert_close(got[attention_mask == 1], expected[attention_mask == 1], atol=ATOL)


def _longformer_of_roberta(
    roberta: transformers.PreTrainedModel, *, max_len: int, window: int
) -> transformers.LongformerModel:
    settings = roberta.config.to_dict() | {
        "attention_window": 2 * window,
        "max_position_embeddings": PAD_TOKEN_ID + 1 + max_len,
    }
    settings.pop("model_type")
    longformer = transformers.LongformerModel(transformers.LongformerConfig(**settings)).eval()
    weights = dict(roberta.state_dict())
    table = weights["embeddings.position_embeddings.weight"]
    first_row = PAD_TOKEN_ID + 1
    tiled = table[first_row:].repeat(-(-max_len // BASE), 1)[:max_len]
    weights["embeddings.position_embeddings.weight"] = torch.cat([table[:first_row], tiled])
    for name in list(weights):
        for part in ("query", "key", "value"):
            if f".self.{part}." in name:
                weights[name.replace(f".{part}.", f".{part}_global.")] = weights[name]
    for buffer in ("embeddings.position_ids", "embeddings.token_type_ids"):
        weights.pop(buffer, None)
    longformer.load_state_dict(weights)
    return longformer
