"""Profiles: what the options mean, and what they refuse."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdexport.graph.targets.tensorrt.profiles import DEFAULT_BATCH, default_lengths, profiles_from_options, with_memory
from hdruntime.errors import InputError


@pytest.mark.parametrize(
    ("max_len", "lengths"),
    [(1, (1,)), (128, (128,)), (129, (128, 129)), (513, (128, 512, 513)), (5000, (128, 512, 1024, 2048, 4096, 5000))],
)
def test_default_buckets_double_up_to_max_len(max_len: int, lengths: tuple[int, ...]) -> None:
    assert default_lengths(max_len) == lengths


@given(st.integers(min_value=1, max_value=20_000), st.data())
def test_every_length_fits_a_default_profile(max_len: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(min_value=1, max_value=max_len))
    profiles = profiles_from_options(max_len)
    assert any(profile.tokens[0] <= tokens <= profile.tokens[2] for profile in profiles)
    assert {profile.batch for profile in profiles} == {DEFAULT_BATCH}


def test_a_profile_is_tuned_for_its_longest_input() -> None:
    profiles = profiles_from_options(4096, profiles="512,128,4096", batch="1:4:16")
    assert [profile.tokens for profile in profiles] == [(1, 128, 128), (1, 512, 512), (1, 4096, 4096)]
    assert {profile.batch for profile in profiles} == {(1, 4, 16)}


def test_shapes_in_the_words_of_trtexec_become_a_profile() -> None:
    (profile,) = profiles_from_options(
        4096,
        min_shapes=["input_ids:1x1,attention_mask:1x1"],
        opt_shapes=["attention_mask:2x300,input_ids:2x300"],
        max_shapes=["input_ids:8x4096,attention_mask:8x4096,token_type_ids:8x4096"],
    )
    assert profile.batch == (1, 2, 8)
    assert profile.tokens == (1, 300, 4096)


def test_repeated_shapes_are_profiles_of_their_own() -> None:
    profiles = profiles_from_options(
        4096,
        min_shapes=["input_ids:1x512", "input_ids:1x1"],
        opt_shapes=["input_ids:1x4096", "input_ids:4x512"],
        max_shapes=["input_ids:2x4096", "input_ids:8x512"],
    )
    assert [(profile.batch, profile.tokens) for profile in profiles] == [
        ((1, 4, 8), (1, 512, 512)),
        ((1, 1, 2), (512, 4096, 4096)),
    ]


def test_profiles_short_of_max_len_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        profiles_from_options(4096, profiles="128,512")
    assert "up to 512 of the bundle's 4096 tokens" in caplog.text


def refuse(message: str, **options: Any) -> None:
    with pytest.raises(InputError, match=message):
        pytest.fail(f"{options} gives {profiles_from_options(4096, **options)}")


def test_lengths_that_are_not_numbers_are_refused() -> None:
    for value in ("", "0", "128,", "1.5", "1_000", "\u0663"):
        refuse(r"profiles holds .*\n.*profiles='128,512,4096'", profiles=value)


def test_batches_that_are_not_numbers_in_order_are_refused() -> None:
    refuse(r"batch holds .*\n.*1:1:8", batch="1:0:8")
    for value in ("4:2:8", "1:9:8", "1:8"):
        refuse("not MIN:OPT:MAX with MIN <= OPT <= MAX", batch=value)


def test_a_profile_longer_than_the_model_names_max_len() -> None:
    with pytest.raises(InputError, match=r"asks for 4097 tokens.*4096.*\n.*max_len=4097"):
        profiles_from_options(4096, profiles="128,4097")


def test_bad_shapes_are_refused_with_the_fix() -> None:
    refused = [
        ("ids:1x1", "names the input 'ids'; inputs are input_ids"),
        ("mems.0:1x512x768", r"names the input 'mems.0'; .* Recurrent states have the sizes of the bundle"),
        ("input_ids:1x1x1", "two axes, batch and tokens"),
        ("input_ids:axb", "holds 'a'"),
        ("input_ids:1x1,attention_mask:1x2", "different shapes"),
        ("input_ids:1x300", "tokens sizes 300, 256 and 4096"),
    ]
    for shape, message in refused:
        refuse(message, min_shapes=[shape], opt_shapes=["input_ids:1x256"], max_shapes=["input_ids:8x4096"])


def test_an_incomplete_profile_is_refused() -> None:
    with pytest.raises(InputError, match=r"1 min shapes, 0 opt shapes, 1 max shapes"):
        profiles_from_options(4096, min_shapes=["input_ids:1x1"], max_shapes=["input_ids:1x1"])


def test_a_batch_beyond_a_tensor_is_refused() -> None:
    with pytest.raises(InputError, match=r"at most 2147483647\.\nGive a smaller batch"):
        profiles_from_options(4096, batch="1:1:99999999999")


def test_one_profile_serves_all_lengths_unless_profiles_are_named() -> None:
    assert [profile.tokens for profile in profiles_from_options(4096, one_profile=True)] == [(1, 4096, 4096)]
    named = profiles_from_options(4096, profiles="128,4096", one_profile=True)
    assert [profile.tokens for profile in named] == [(1, 128, 128), (1, 4096, 4096)]


def test_memories_are_tuned_for_their_full_size_and_replace_those_of_an_engine_before() -> None:
    plain = profiles_from_options(4096, profiles="512,4096")
    with_them = with_memory(plain, most=384)
    assert [(profile.tokens, profile.memory) for profile in with_them] == [
        ((1, 512, 512), (1, 384, 384)), ((1, 4096, 4096), (1, 384, 384)),
    ]  # fmt: skip
    assert {profile.memory for profile in with_memory(with_them, most=64)} == {(1, 64, 64)}
    assert with_memory(with_them, most=0) == plain
