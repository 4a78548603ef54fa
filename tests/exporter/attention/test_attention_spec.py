"""What `--attention` accepts, refuses and warns of."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hdexport.attention.attention_type import ConversionContext
from hdexport.attention.blocks import BlockRequest, LastBlock, Mode, Pattern
from hdexport.attention.registry import attention_from_spec, attention_types
from hdexport.attention.window import Window
from hdexport.attention.window.attention_type import MOST_GLOBAL_TOKENS, WindowAttentionType, WindowRequest
from hdexport.families import convertible_model_types, family_of
from hdruntime.bundle.manifest import Task
from hdruntime.errors import InputError, ModelError
from support.comparators import named_case

SYNTAXES = {word: syntax for type_ in attention_types() for word, syntax in type_.syntaxes.items()}


def window(tokens: int, *, right: int | None = None, **others: Any) -> WindowRequest:
    return WindowRequest(
        window=Window(**{"tokens": tokens, "global_tokens": 1, "dilation": (1,), "right": right} | others)
    )


READ: dict[str, dict[str, object]] = {
    "window:256": {"window": window(256)},
    "global:7,window:256": {"window": window(256, global_tokens=7)},
    "window:64,global:2,dilation:1/1/2/4": {"window": window(64, global_tokens=2, dilation=(1, 1, 2, 4))},
    f"window:64,global:{MOST_GLOBAL_TOKENS}": {"window": window(64, global_tokens=MOST_GLOBAL_TOKENS)},
    "right:100,window:64,global:0": {"window": window(64, global_tokens=0, right=100)},
    "bigbird:block=64,random=0": {"blocks": BlockRequest(pattern=Pattern.BIGBIRD, block_size=64, random_blocks=0)},
    "bigbird:seed=7": {"blocks": BlockRequest(pattern=Pattern.BIGBIRD, mode=Mode.TABLE, seed=7)},
    "bigbird:table=a/b.npy": {"blocks": BlockRequest(pattern=Pattern.BIGBIRD, mode=Mode.TABLE, file=Path("a/b.npy"))},
    "etc:global=2,block=84,tokens=101/102": {
        "blocks": BlockRequest(pattern=Pattern.ETC, block_size=84, global_tokens=2, global_ids=(101, 102))
    },
    "blocks:file=x.npz,block=128": {"blocks": BlockRequest(pattern=Pattern.BLOCKS, block_size=128, file=Path("x.npz"))},
    "lsh": {"lsh": {}},
    "lsh:seed=0,buckets=8/16,before=2,after=1": {"lsh": {"seed": 0, "buckets": (8, 16), "before": 2, "after": 1}},
    "favor": {"favor": {}},
    "favor:seed=0,compat,features=1": {"favor": {"features": 1, "seed": 0, "compat": 1}},
}


def test_a_request_is_read() -> None:
    for spec, expected in READ.items():
        assert attention_from_spec(spec) == expected, spec


def test_options_go_to_the_kind_that_has_them() -> None:
    assert attention_from_spec(None) == {}
    nothing = {"max_global": None, "bigbird_last_block": None, "global_embeddings": None}
    assert attention_from_spec(None, nothing) == {}
    assert attention_from_spec(None, {"max_global": 8}) == {"window": WindowRequest(max_global=8)}
    assert attention_from_spec("etc:global=2", {"max_global": 8, "global_embeddings": "rows.npy"}) == {
        "window": WindowRequest(max_global=8),
        "blocks": BlockRequest(pattern=Pattern.ETC, global_tokens=2, global_embeddings=Path("rows.npy")),
    }


def test_a_policy_of_the_last_block_is_read() -> None:
    for policy in LastBlock:
        request = attention_from_spec(None, {"bigbird_last_block": policy.value})
        assert request == {"blocks": BlockRequest(last_block=policy)}


NOT_UNDERSTOOD = (
    "", "window", "window:", "256", "window:2.5", "global:1", "dense", "window:8,window:9", "window:8,",
    "window:8,dilation:1//2", "window:8;global:1", "right:8", "bigbird=64", "bigbird:64", "bigbird:global=3",
    "bigbird:block=8,block=8", "etc:block=64", "blocks:file=x.npz",
    "lsh:", "lsh:chunks=3", "favor:", "favor:heads=2", "favor:compat=1",
)  # fmt: skip


def test_an_invalid_specification_is_answered_with_the_grammar() -> None:
    for spec in NOT_UNDERSTOOD:
        with named_case(spec):
            with pytest.raises(InputError) as caught:
                attention_from_spec(spec)
            assert str(caught.value).startswith(f"attention={spec!r} has an invalid part: ")
            assert all(syntax.grammar in str(caught.value) for syntax in SYNTAXES.values())
            word = spec.partition(":")[0]
            assert f"For example: attention='{word if word in SYNTAXES else 'window'}:" in str(caught.value)


REFUSED = {
    "window:0": "has window 0; it must be 1 or more",
    "window:8,right:-1": "has right -1; it must be 0 or more",
    "window:8,global:3841": "has global 3841; it must be 0 to 3840",
    "window:8,dilation:1/-2": "has dilation -2; it must be 1 or more",
    "bigbird:block=0": "has block 0; it must be 1 or more.\nFor example: attention='bigbird:block=64",
    "bigbird:seed=-1": "has seed -1; it must be 0 to 2147483647",
    "lsh:chunk=0": "has chunk 0; it must be 1 to 32768.\nFor example: attention='lsh:chunk=64,rounds=4'",
    "lsh:before=65": "has before 65; it must be 0 to 64",
    "lsh:buckets=8/3": "8 x 3 buckets; each number must be even",
    "favor:features=0": "features 0; it must be 1 to 16384.\nFor example: attention='favor:features=256'",
    "favor:seed=-1": "seed -1; it must be 0 to",
    # What contradicts itself.
    "bigbird:mode=hf_eval,seed=1": "has a table of random blocks, which mode=hf_eval does not use",
    "bigbird:table=x.npy,seed=1": "has a table, and a seed to draw one with",
    "etc:global=3,tokens=1/2": "has 2 ids for 3 global tokens.\nUse one id for all, tokens=1, or 3",
}


def test_numbers_out_of_range_and_contradictions_are_refused() -> None:
    for spec, message in REFUSED.items():
        with named_case(spec), pytest.raises(InputError, match=message):
            attention_from_spec(spec)


def check(window: Window, *, model_type: str = "bert", heads: int = 4, max_len: int = 512) -> None:
    config = SimpleNamespace(model_type=model_type, num_attention_heads=heads)
    context = ConversionContext(
        model=SimpleNamespace(config=config),
        family=family_of(model_type),
        task=Task.FEATURE_EXTRACTION,
        max_len=max_len,
        convertible=convertible_model_types,
    )
    conversion = WindowAttentionType().conversion(WindowRequest(window=window), context)
    assert conversion is not None
    assert (conversion.window, conversion.is_native, conversion.inputs, conversion.padding) == (window, False, (), None)


def test_dilations_that_are_not_one_per_head_are_refused() -> None:
    for dilation in ((1, 2), (1, 2, 3), (1, 2, 3, 4, 5)):
        message = rf"has {len(dilation)} dilations, and the model has 4 heads in each layer.\nGive one for all heads"
        with named_case(dilation), pytest.raises(InputError, match=message):
            check(Window(tokens=8, global_tokens=1, dilation=dilation))


def test_a_family_that_cannot_be_windowed_says_why_and_which_can() -> None:
    for model_type, reason in {"mpnet": "Its attention scores have", "modernbert": "Its local layers attend"}.items():
        message = rf"{model_type} cannot be .*\. {reason}.*\n.*albert, bert, .*roberta"
        with named_case(model_type), pytest.raises(ModelError, match=message):
            check(Window(tokens=8, global_tokens=1, dilation=(1,)), model_type=model_type)


def test_a_window_that_covers_every_text_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for tokens, right, warns in (
        (510, None, False), (511, None, True), (512, None, True), (100_000, None, True), (512, 510, False),
        (510, 512, False), (511, 512, True), (100_000, 0, False),
    ):  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hdexport"):
            check(Window(tokens=tokens, global_tokens=1, dilation=(1,), right=right))
        assert ("the attention is dense" in caplog.text) == warns, (tokens, right)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hdexport"):
        check(Window(tokens=1000, global_tokens=1, dilation=(1, 1, 1, 2)))
    assert caplog.text == "", "a dilated head sees half of a text"
