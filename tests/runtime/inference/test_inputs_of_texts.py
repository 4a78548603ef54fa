"""Texts of different lengths as the arrays of a batch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, Role
from hdruntime.bundle.reader import open_bundle
from hdruntime.inference.inputs import inputs_of_texts
from hdruntime.text.encoding import Encoding
from support.tiny_bundle import make_bundle

ONES = Default(fill=Fill.ONES)
MASKS = [
    InputSpec(name=role.value, dtype="int64", shape=("batch", "tokens"), role=role, default=ONES)
    for role in (Role.POOLED, Role.ATTENDED)
]
TEXTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1)), min_size=1, max_size=9), *[st.integers(0, 3)] * 2
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    manifest = open_bundle(make_bundle(tmp_path_factory.mktemp("tiny") / "bundle", token_types=True)).manifest
    assert manifest.tokenizer is not None
    tokenizer = dataclasses.replace(manifest.tokenizer, pad_token_id=7)
    return dataclasses.replace(manifest, inputs=(*manifest.inputs, *MASKS), tokenizer=tokenizer)


@given(texts=TEXTS)
def test_padding_is_on_the_right_and_each_input_has_its_value_there(
    texts: list[tuple[list[tuple[int, int]], int, int]], manifest: Manifest
) -> None:
    encodings = []
    for tokens, prompt, unattended in texts:
        ids, types = map(list, zip(*tokens, strict=True))
        prompt, unattended = min(prompt, len(ids)), min(unattended, len(ids))
        encodings.append(Encoding(ids, types, prompt_tokens=prompt, unattended_tokens=unattended))
    most = max(map(len, encodings))
    found = inputs_of_texts(encodings, manifest, memory=0)
    for row, text in enumerate(encodings):
        tokens, padding = len(text), most - len(text)
        expected = {
            "input_ids": text.input_ids + [7] * padding,
            "attention_mask": [1] * tokens + [0] * padding,
            "token_type_ids": text.token_type_ids + [0] * padding,
            "pooled": [0] * text.prompt_tokens + [1] * (tokens - text.prompt_tokens) + [0] * padding,
            "attended": [1] * (tokens - text.unattended_tokens) + [0] * (text.unattended_tokens + padding),
        }
        assert {name: array[row].tolist() for name, array in found.items()} == expected
