"""Bundles of format version 1 are read as those of today that say the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, PaddingRule, Role
from hdruntime.bundle.manifest_json import json_from_manifest, manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.writer import seal
from hdruntime.constants import FORMAT_VERSION
from hdruntime.errors import BundleCorruptError
from support.comparators import named_case
from support.format_1 import format_1_of
from support.tiny_bundle import INPUTS

HEADS = 4
NEW_KEYS = ("windows", "window", "block_sparse", "global_attention", "token_type_separator_id")
"""Keys that were added to the first format later."""

WINDOW = {"tokens": 256, "global_tokens": 1, "dilation": [1, 2, 1, 2]}
BIGBIRD = {
    "kind": "bigbird",
    "block_size": 64,
    "mode": "hf_eval",
    "random_blocks": 3,
    "global_tokens": 0,
    "last_block": "padded",
    "dense_tokens": 704,
}
ETC = {**BIGBIRD, "kind": "etc", "mode": "none", "random_blocks": 0, "global_tokens": 16, "last_block": "row"}
LISTS = {**ETC, "kind": "blocks", "mode": "lists", "global_tokens": 0, "dense_tokens": 0}
FIRST_TOKEN = {"default": "first_token", "bound": 1, "separator_id": None}
PADDED = PaddingRule(multiple_of=64, free_up_to=704)
QUESTION = {"default": "question", "bound": 64, "separator_id": 2}


def without_kind(block_sparse: dict[str, Any], **changed: object) -> dict[str, Any]:
    """What says the same today."""
    pattern = block_sparse["kind"]
    return {**block_sparse, "kind": "blocks", "pattern": pattern, **changed}


def marks(fill: Fill, token_id: int | None, bound: int) -> InputSpec:
    default = Default(fill=fill, token_id=token_id)
    shape = ("batch", "tokens")
    return InputSpec(
        name="global_attention_mask", dtype="int64", shape=shape, role=Role.MARKS, default=default, bound=bound
    )


@pytest.fixture
def manifest(bundle_path: Path) -> Manifest:
    """Of today, of dense attention in standard operators; its model has token types."""
    plain = open_bundle(bundle_path).manifest
    return dataclasses.replace(plain, num_heads=HEADS, inputs=INPUTS, operators={"hdexport::Other": 2})


def read(manifest: Manifest, **old: object) -> Manifest:
    """What is read of a manifest of the first format, as a file of it was."""
    return manifest_from_json(json.dumps(format_1_of(json.loads(json_from_manifest(manifest)), **old)))


def test_the_helper_writes_the_first_format(manifest: Manifest) -> None:
    old = format_1_of(json.loads(json_from_manifest(manifest)))
    assert old["format_version"] == 1
    assert old["attention"] == {"hdexport::Other": 2}
    assert [set(spec) for spec in old["inputs"]] == [{"name", "dtype", "shape"}] * 3
    assert set(NEW_KEYS) < set(old)
    assert not {"operators", "padding"} & set(old)


@pytest.mark.parametrize("drop", [(), NEW_KEYS], ids=["with all keys", "with the first keys"])
def test_a_plain_one_is_what_it_is_today(manifest: Manifest, drop: tuple[str, ...]) -> None:
    old = format_1_of(json.loads(json_from_manifest(manifest)))
    for key in drop:
        del old[key]
    found = manifest_from_json(json.dumps(old))
    assert found == manifest
    assert found.format_version == FORMAT_VERSION
    assert (found.attention, found.padding) == ((), None)


def test_token_types_that_change_after_a_separator_stay_so(manifest: Manifest) -> None:
    after = dataclasses.replace(INPUTS[2], default=Default(fill=Fill.AFTER_TOKEN, token_id=66))
    expected = dataclasses.replace(manifest, inputs=(*INPUTS[:2], after))
    assert read(manifest, token_type_separator_id=66) == expected


@pytest.mark.parametrize(
    ("operators", "windows", "records"),
    [
        ({"hdexport::DenseAttention": 6}, [], [{"kind": "dense", "layers": 6}]),
        ({"DenseAttention": 1, "SlidingWindowAttention": 2}, [], [{"kind": "dense", "layers": 1}]),
        ({"hdexport::SlidingWindowAttention": 2}, [], []),
        (
            {"hdexport::DenseAttention": 8, "hdexport::SlidingWindowAttention": 2},
            [3, 3],
            [{"kind": "dense", "layers": 8}, {"kind": "window", "layers": [3, 3], "converted": None}],
        ),
    ],
)
def test_dense_layers_are_counted_by_their_operator(
    manifest: Manifest, operators: dict[str, int], windows: list[int], records: list[dict[str, Any]]
) -> None:
    found = read(manifest, attention=operators, windows=windows)
    assert found.operators == operators
    assert list(found.attention) == records


@pytest.mark.parametrize(
    ("windows", "window"),
    [([64, 64, 64], None), ([256, 256], WINDOW), ([0], None), ([], WINDOW)],
    ids=["of a ModernBERT", "converted", "a window of nothing", "converted, of layers that were not listed"],
)
def test_windows_are_those_of_today(manifest: Manifest, windows: list[int], window: dict | None) -> None:
    record = {"kind": "window", "layers": windows, "converted": window}
    assert read(manifest, windows=windows, window=window) == dataclasses.replace(manifest, attention=(record,))


@pytest.mark.parametrize(
    ("global_attention", "expected"),
    [(FIRST_TOKEN, (Fill.FIRST_TOKEN, None, 1)), (QUESTION, (Fill.UNTIL_TOKEN, 2, 64))],
    ids=["first token", "question"],
)
def test_a_longformer_has_marks(
    manifest: Manifest, global_attention: dict[str, Any], expected: tuple[Fill, int | None, int]
) -> None:
    today = dataclasses.replace(
        manifest,
        inputs=(*INPUTS[:2], marks(*expected)),
        attention=({"kind": "window", "layers": [4, 4], "converted": None},),
    )
    assert read(today, windows=[4, 4], global_attention=global_attention) == today


@pytest.mark.parametrize(
    ("model_type", "block_sparse", "converted", "padding"),
    [
        pytest.param("big_bird", BIGBIRD, False, PADDED, id="BigBird"),
        pytest.param("bigbird_pegasus", BIGBIRD, False, PADDED, id="the encoder of BigBird-Pegasus"),
        pytest.param("big_bird", {**BIGBIRD, "last_block": "row"}, False, None, id="BigBird with its own ends"),
        pytest.param("big_bird", {**BIGBIRD, "mode": "table"}, False, PADDED, id="BigBird with a table"),
        pytest.param("bert", BIGBIRD, True, PADDED, id="converted"),
        pytest.param("bert", {**BIGBIRD, "last_block": "row", "mode": "table"}, True, None, id="own ends and a table"),
        pytest.param("bert", {**BIGBIRD, "dense_tokens": 0}, True, PaddingRule(multiple_of=64), id="nothing dense"),
        pytest.param("bert", ETC, True, None, id="ETC"),
        pytest.param("roberta", LISTS, True, None, id="block lists"),
    ],
)
def test_block_sparse_attention_is_that_of_today(
    manifest: Manifest,
    model_type: str,
    block_sparse: dict[str, Any],
    converted: bool,
    padding: PaddingRule | None,
) -> None:
    today = dataclasses.replace(
        manifest,
        model_type=model_type,
        attention=(without_kind(block_sparse, converted=converted),),
        padding=padding,
    )
    assert read(today, block_sparse=block_sparse) == today


WRONG_OLD_KEYS = [
    ({"attention": {}}, r"manifest\.attention lists no operator"),
    ({"attention": {"A": 0}}, r"manifest\.attention\['A'\] should be `int` >= 1, not 0"),
    ({"attention": []}, r"manifest\.attention should be `object`, not \[\]"),
    ({"windows": [-1]}, r"manifest\.windows\[0\] should be `int` >= 0, not -1"),
    ({"windows": None}, r"manifest\.windows should be `array`, not null"),
    ({"window": 5}, r"manifest\.window should be `object \| null`, not 5"),
    ({"window": {**WINDOW, "tokens": 0}}, r"manifest\.window\.tokens should be `int` >= 1, not 0"),
    ({"window": {"tokens": 1, "global_tokens": 0}}, r"manifest\.window\.dilation is missing"),
    ({"window": {**WINDOW, "dilation": [1, 2]}}, r"manifest\.window\.dilation has 2 values for 4 heads"),
    ({"window": {**WINDOW, "dilation": []}}, r"manifest\.window\.dilation has 0 values for 4 heads"),
    ({"window": {**WINDOW, "dilation": [0]}}, r"manifest\.window\.dilation\[0\] should be `int` >= 1, not 0"),
    *(
        ({"block_sparse": {**BIGBIRD, **change}}, rf"manifest\.block_sparse\.{message}")
        for change, message in (
            ({"block_size": 0}, "block_size should be `int` >= 1"),
            ({"kind": "spiral"}, "kind should be one of 'bigbird'"),
            ({"kind": "etc"}, "mode should be none for etc, not hf_"),
            ({"mode": "none"}, "mode should be hf_eval or table for bigbird"),
            ({"last_block": "first"}, "last_block should be one of 'padded', 'row'"),
            ({"dense_tokens": -1}, "dense_tokens should be `int` >= 0"),
        )
    ),
    ({"global_attention": FIRST_TOKEN}, r"manifest\.global_attention needs an input global_attention_mask"),
    ({"global_attention": {**QUESTION, "default": "all"}}, r"manifest\.global_attention\.default should be one of"),
    ({"global_attention": {**QUESTION, "bound": 0}}, r"manifest\.global_attention\.bound should be `int` >= 1"),
    ({"token_type_separator_id": -1}, r"manifest\.token_type_separator_id should be `int.*` >= 0, not -1"),
    ({"num_heads": "4"}, r"manifest\.num_heads should be `int`, not \"4\""),
    ({"model_type": None}, r"manifest\.model_type should be `str`, not null"),
    ({"inputs": None}, r"manifest\.inputs should be `array`, not null"),
    ({"inputs": []}, r"manifest\.inputs has 0 of the role ids; exactly one is needed"),
    ({"max_len": 0}, r"manifest\.max_len should be `int` >= 1, not 0"),
]


def test_what_is_wrong_in_an_old_key_is_named(manifest: Manifest) -> None:
    for old, message in WRONG_OLD_KEYS:
        with named_case(message):
            with pytest.raises(BundleCorruptError, match=rf"^{message}(.|\n)*Rebuild or copy the bundle again\.") as e:
                read(manifest, **old)
            assert "inputs[" not in str(e.value)


LACKING = ("attention", "inputs", "num_heads", "model_type", "max_len", "tokenizer", "global_attention")


def test_a_key_that_an_old_manifest_lacks_is_named(manifest: Manifest) -> None:
    for key in LACKING:
        with named_case(key):
            marked = dataclasses.replace(manifest, inputs=(*INPUTS[:2], marks(Fill.FIRST_TOKEN, None, 1)))
            values = format_1_of(json.loads(json_from_manifest(marked)), global_attention=FIRST_TOKEN)
            del values[key]
            with pytest.raises(BundleCorruptError, match=rf"manifest\.{key} is "):
                manifest_from_json(json.dumps(values))


@pytest.mark.parametrize("global_attention", [{**FIRST_TOKEN, "separator_id": 3}, {**QUESTION, "separator_id": None}])
def test_a_default_that_contradicts_its_separator_is_refused(
    manifest: Manifest, global_attention: dict[str, Any]
) -> None:
    marked = dataclasses.replace(manifest, inputs=(*INPUTS[:2], marks(Fill.FIRST_TOKEN, None, 1)))
    message = r"manifest\.global_attention\.separator_id is (3|None) for the default"
    with pytest.raises(BundleCorruptError, match=message):
        read(marked, global_attention=global_attention)


@pytest.mark.parametrize("name", ["position_ids", "mask", "memory"])
def test_an_input_of_a_name_unknown_to_the_first_format_is_refused(manifest: Manifest, name: str) -> None:
    other = dataclasses.replace(INPUTS[2], name=name)
    changed = dataclasses.replace(manifest, inputs=(*INPUTS[:2], other))
    message = rf"manifest\.inputs: the name should be one of input_ids, attention_mask, .*, not '{name}'"
    with pytest.raises(BundleCorruptError, match=message):
        read(changed)


def test_keys_of_today_mean_nothing_in_an_old_manifest(manifest: Manifest) -> None:
    """No version that wrote the first format read them."""
    assert read(manifest, padding={"multiple_of": 64}, operators={"A": 1}) == manifest


def test_keys_of_the_first_format_mean_nothing_today(manifest: Manifest) -> None:
    values = json.loads(json_from_manifest(manifest))
    values |= {"windows": [3], "window": WINDOW, "block_sparse": 5, "global_attention": FIRST_TOKEN}
    assert manifest_from_json(json.dumps(values)) == manifest


@pytest.mark.parametrize("check_files", [True, False])
def test_an_old_bundle_opens_and_is_written_in_the_format_of_today(bundle_path: Path, check_files: bool) -> None:
    today = open_bundle(bundle_path).manifest
    path = bundle_path / "manifest.json"
    path.write_text(json.dumps(format_1_of(json.loads(path.read_text()))))
    opened = open_bundle(bundle_path, check_files=check_files).manifest
    assert opened == today
    assert seal(bundle_path, opened) == today
    written = json.loads(path.read_text())
    assert written["format_version"] == FORMAT_VERSION == 2
    assert not set(NEW_KEYS) & set(written)
    assert open_bundle(bundle_path).manifest == today


def test_an_old_bundle_runs_with_the_rule_of_its_padding(
    new_bundle: Callable[..., Path], model: Callable[..., np.ndarray]
) -> None:
    rule = PaddingRule(multiple_of=4, free_up_to=8)
    path = new_bundle(padding=rule) / "manifest.json"
    block_sparse = {**BIGBIRD, "block_size": 4, "dense_tokens": 8}
    path.write_text(json.dumps(format_1_of(json.loads(path.read_text()), block_sparse=block_sparse)))
    ids, mask = np.full((2, 13), 4), (np.arange(13) < [[13], [9]]).astype(np.int64)
    with hdruntime.load(path.parent) as session:
        assert session.manifest.padding == rule
        got = session(input_ids=ids, attention_mask=mask)["last_hidden_state"]
    np.testing.assert_allclose(got, np.where(mask[..., None] == 1, model(ids, mask, rule), 0), atol=1e-5)
