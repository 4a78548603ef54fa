"""The text format that is written is what the real parser reads."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from hdexport.triton_repository.protobuf_text import Message, Name, protobuf_text
from support.comparators import named_case


def parsed(message: Message) -> model_config_pb2.ModelConfig:
    return text_format.Parse(protobuf_text(message), model_config_pb2.ModelConfig())


SPECIAL = ['say "hi"', "back\\slash", "it's", "line\nline", "tab\t", "\x00\x7f", "ünïcode 😀", "#{}"]


@given(text=st.sampled_from(SPECIAL) | st.text())
@settings(max_examples=300, deadline=None)
def test_any_string_is_read_back_by_the_real_parser(text: str) -> None:
    # A lone surrogate is no character, and UTF-8 has no form for it.
    text = text.encode(errors="replace").decode()
    message = {"name": text, "input": [{"name": text}], "cc_model_filenames": [{"key": text, "value": text}]}
    config = parsed(message)
    assert config.name == config.input[0].name == config.cc_model_filenames[text] == text


def test_whole_numbers_are_read_back_to_the_ends_of_64_bits() -> None:
    for number in [-(2**63), -1, 0, 1, 2**31, 2**63 - 1]:
        with named_case(number):
            config = parsed({"input": [{"dims": [number, number]}]})
            assert list(config.input[0].dims) == [number, number]


def test_booleans_enums_and_empty_lists_are_read_back() -> None:
    config = parsed(
        {"input": [{"optional": True, "allow_ragged_batch": False, "data_type": Name("TYPE_FP32"), "dims": []}]}
    )
    assert config.input[0].optional
    assert not config.input[0].allow_ragged_batch
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32
    assert not config.input[0].dims
    assert not parsed({"input": []}).input


def test_a_value_without_a_form_is_an_error_of_ours() -> None:
    with pytest.raises(TypeError, match="float"):
        protobuf_text({"rate": 0.5})
