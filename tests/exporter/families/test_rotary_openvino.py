"""Rotary positions in OpenVINO: one operator turns queries or keys, and answers are Hugging Face's.

Those in bfloat16 are in test_openvino_bfloat16.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import hdruntime
from hdruntime.backends.openvino import runner
from hdruntime.optional import require
from support.answers import ATOL, inputs_of
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.needs import needs_openvino
from support.padded_batches import cases

pytestmark = needs_openvino

MODEL_TYPES = ("gte", "roformer")
"""Of the library's own rotation, and of ours."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_queries_and_keys_are_turned_by_one_operator_each(openvino_bundles, model_type: str) -> None:
    bundle = openvino_bundles(model_type)
    compiled = require("openvino").Core().compile_model(bundle.path / "openvino.onnx", "CPU")
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops()]
    assert kinds.count("RoPE") == 2 * bundle.manifest.num_layers


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_openvino_answers_as_hugging_face(openvino_bundles, model_type: str) -> None:
    bundle = openvino_bundles(model_type)
    with hdruntime.load(bundle.path, backend="openvino", threads=1) as session:
        for tokens, name, input_ids, attention_mask in cases((1, 65, 300)):
            feeds, real = inputs_of(bundle, input_ids, attention_mask), attention_mask == 1
            with named_case(f"{tokens} tokens", name):
                expected = bundle.hugging_face(**feeds)["last_hidden_state"][real]
                assert_close(session(**feeds)["last_hidden_state"][real], expected, atol=ATOL)


@pytest.mark.parametrize(
    ("model_type", "rows", "tokens"),
    [
        nightly_unless(
            model_type != "nomic_bert" and (rows == 1 or model_type in ("modernbert", "bert")), model_type, rows, tokens
        )
        for model_type in ("eurobert", "modernbert", "qwen3", "nomic_bert", "esm", "bert")
        for rows, tokens in ((1, 40), (3, 20))
    ],
)
def test_texts_of_one_length_are_answered_after_memory_is_given_back(
    openvino_bundles, monkeypatch: pytest.MonkeyPatch, model_type: str, rows: int, tokens: int
) -> None:
    """Each batch here is a large one, after which memory is released and must be there again for the next."""
    monkeypatch.setattr(runner, "_LARGE_RUN_TOKENS", 0)
    bundle = openvino_bundles(model_type)
    numbers = np.random.default_rng(0)
    with hdruntime.load(bundle.path, backend="openvino", threads=1) as session:
        # Answers to another text would be of the wrong text. A mask with a hole needs the graph with masks.
        for place, has_hole in enumerate([False, False, False, True, True, True, False]):
            input_ids = numbers.integers(5, 90, (rows, tokens))
            attention_mask = np.ones_like(input_ids)
            attention_mask[:, 7] = not has_hole
            feeds, real = inputs_of(bundle, input_ids, attention_mask), attention_mask == 1
            with named_case(place, has_hole):
                expected = bundle.session(**feeds)["last_hidden_state"][real]
                assert_close(session(**feeds)["last_hidden_state"][real], expected, atol=ATOL)
