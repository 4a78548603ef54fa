"""What becomes of a request for block-sparse attention: its description, its tables, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hdexport.attention.attention_type import ConversionContext
from hdexport.attention.blocks import BlockSparse, LastBlock, Mode, Pattern
from hdexport.attention.blocks.conversion import BlockConversion, block_conversion, read_conversion
from hdexport.attention.registry import attention_from_spec
from hdexport.families import convertible_model_types, family_of
from hdexport.model.family import Family
from hdexport.model.surgery import extend_positions
from hdexport.model.task import encoder_of
from hdruntime.bundle.manifest import PaddingRule, Scheme, Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError, ModelError
from support.attention_records import recorded
from support.comparators import named_case
from support.tiny_models import save_tiny_model

MAX_LEN = 300

ROW = {"bigbird_last_block": "row"}


def of_config(model_type: str, config: dict) -> Family:
    family = family_of(model_type)
    return family.of_config(config) if family.of_config and config else family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Tiny models by type, with `MAX_LEN` positions; nothing here changes them."""
    made = {}

    def model_of(model_type: str, **changes: object):
        key = (model_type, *changes.items())
        if key not in made:
            directory = tmp_path_factory.mktemp(model_type)
            model = save_tiny_model(directory, model_type, Task.FEATURE_EXTRACTION, **changes)
            model = encoder_of(model, Task.FEATURE_EXTRACTION)
            extend_positions(model, of_config(model_type, changes), max_len=MAX_LEN, scheme=Scheme.TILE, alpha=0.4)
            made[key] = model
        return made[key]

    return model_of


@pytest.fixture
def conversion_of(models):
    """`block_conversion` for a type, a value of ``--attention``, and values of the other options."""

    def make(
        model_type: str,
        spec: str | None,
        *,
        config: dict | None = None,
        first_special_id: Callable[[], int | None] = lambda: 7,
        **options: object,
    ) -> BlockConversion | None:
        context = ConversionContext(
            model=models(model_type, **config or {}),
            family=of_config(model_type, config or {}),
            task=Task.FEATURE_EXTRACTION,
            max_len=MAX_LEN,
            first_special_id=first_special_id,
            convertible=convertible_model_types,
        )
        return block_conversion(attention_from_spec(spec, options).get("blocks"), context)

    return make


def big_bird(**changes: object) -> BlockSparse:
    values = {
        "pattern": Pattern.BIGBIRD, "block_size": 64, "mode": Mode.HF_EVAL, "random_blocks": 3, "global_tokens": 0,
        "last_block": LastBlock.PADDED, "dense_tokens": 704, "converted": True,
    }  # fmt: skip
    return BlockSparse(**values | changes)


def test_big_birds_own_sizes_are_the_default(conversion_of) -> None:
    conversion = conversion_of("bert", "bigbird")
    assert conversion == BlockConversion(
        is_native=False,
        record=big_bird(),
        padding=PaddingRule(multiple_of=64, free_up_to=704),
        note=conversion.note,
    )
    assert conversion.note.startswith("Attention is cut to blocks of 64 tokens, which the model was not trained with")


def test_the_description_is_that_of_the_request(conversion_of) -> None:
    etc = {
        "pattern": Pattern.ETC, "block_size": 84, "mode": Mode.NONE, "random_blocks": 0, "global_tokens": 6,
        "last_block": LastBlock.ROW, "dense_tokens": 0,
    }  # fmt: skip
    for spec, options, expected in (
        ("bigbird:block=4,random=0", {}, {"block_size": 4, "random_blocks": 0, "dense_tokens": 20}),
        ("bigbird:block=4,seed=1", {}, {"block_size": 4, "mode": Mode.TABLE, "dense_tokens": 44}),
        ("etc:global=6,block=84", {}, etc),
    ):
        assert conversion_of("bert", spec, **options).record == big_bird(**expected), spec


def test_a_big_bird_has_its_own_and_may_choose_its_random_blocks(conversion_of) -> None:
    own = {"block_size": 4, "random_blocks": 3, "dense_tokens": 44, "converted": False}
    config = {"block_size": 4, "num_random_blocks": 3}
    padding = PaddingRule(multiple_of=4, free_up_to=44)
    expected = BlockConversion(is_native=True, record=big_bird(**own), padding=padding, note=None)
    assert conversion_of("big_bird", None, config=config) == expected
    by_row = conversion_of("big_bird", None, config=config, **ROW)
    assert by_row.record == big_bird(**own, last_block=LastBlock.ROW)
    assert by_row.padding is None
    drawn = conversion_of("big_bird", "bigbird:mode=table", config=config)
    assert drawn.record == big_bird(**own, mode=Mode.TABLE)
    assert drawn.listed_blocks.shape == (2, 4, 73, 3)
    assert conversion_of("bert", None) is None
    assert conversion_of("big_bird", None, config={"attention_type": "original_full"}) is None


def test_tables_are_read_from_a_file(conversion_of, tmp_path: Path) -> None:
    table = np.random.default_rng(0).integers(0, 75, (2, 4, 73, 2))
    np.save(tmp_path / "table.npy", table)
    conversion = conversion_of("bert", f"bigbird:block=4,random=2,table={tmp_path / 'table.npy'}")
    np.testing.assert_array_equal(conversion.listed_blocks, table)
    with pytest.raises(InputError, match=r"lists 2 random blocks per row; 3 were requested.\nSet random=2, or"):
        conversion_of("bert", f"bigbird:block=4,table={tmp_path / 'table.npy'}")


def test_a_model_that_shares_its_layers_has_one_table(conversion_of) -> None:
    assert conversion_of("albert", "bigbird:block=4,seed=0").listed_blocks.shape == (1, 4, 73, 3)


def test_global_tokens_are_what_the_layers_are_given_for_their_ids(conversion_of, models) -> None:
    model = models("electra")  # whose embeddings are narrower than its layers
    conversion = conversion_of("electra", "etc:global=3,block=4,tokens=9/8/9")
    with torch.inference_mode():
        states = model.embeddings_project(model.embeddings(torch.tensor([[9, 8, 9]])))
    np.testing.assert_array_equal(conversion.global_embeddings, states[0].numpy())
    # Without ids it is the token that texts begin with.
    default, named = (conversion_of("electra", f"etc:global=3,block=4{ids}") for ids in ("", ",tokens=7"))
    np.testing.assert_array_equal(default.global_embeddings, named.global_embeddings)


def test_global_tokens_are_read_from_a_file(conversion_of, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 32))
    np.save(tmp_path / "rows.npy", rows)
    options = {"global_embeddings": tmp_path / "rows.npy", "first_special_id": lambda: None}
    conversion = conversion_of("bert", "etc:global=3,block=4", **options)
    np.testing.assert_array_equal(conversion.global_embeddings, rows.astype(np.float32))


def test_a_file_of_other_embeddings_is_refused(conversion_of, tmp_path: Path) -> None:
    """Other damage that no reader of arrays may fail on is in test_random_blocks.py."""
    path = tmp_path / "rows.npy"
    for content, message in (
        (np.zeros((2, 32), np.float32), r"holds float32 \[2, 32\]; this model takes float32 \[3, 32\]"),
        (np.full((3, 32), np.nan, np.float32), "holds NaN or infinity"),
        (None, "cannot be read: it is not a file of NumPy arrays.*\nWrite it with numpy.save"),
    ):
        if content is None:
            path.write_bytes(b"no array")
        else:
            np.save(path, content)
        with named_case(message), pytest.raises(InputError, match=message):
            conversion_of("bert", "etc:global=3,block=4", global_embeddings=path)


MISFITS = (
    (
        "mpnet",
        "bigbird",
        {},
        ModelError,
        "mpnet cannot be converted to block-sparse attention. Its attention scores have",
    ),
    ("big_bird", "etc:global=2", {}, ModelError, "big_bird has block-sparse attention of its own"),
    ("big_bird", "bigbird:block=8", {}, InputError, "has block=8, and the checkpoint has 4.\nLeave it out"),
    ("bert", None, ROW, InputError, "bigbird_last_block='row' is for BigBird's attention"),
    ("bert", "bigbird", {"global_embeddings": Path("x.npy")}, InputError, "is for the global tokens of attention='etc"),
    (
        "esm",
        "etc:global=2",
        {},
        ModelError,
        r"computes positions, .*\nUse attention='window:256,global:1' or attention='bigbird",
    ),
    ("bert", "etc:global=301", {}, InputError, "has 301 global tokens, and there are 300 positions for them"),
    ("bert", "etc:global=2,tokens=120", {}, InputError, "has the id 120; ids of the vocabulary are 0 to 119"),
    ("bert", "etc:global=2", {"first_special_id": lambda: None}, InputError, r"Name an id, .*tokens=101\', or a file"),
    ("bert", "bigbird:block=100,seed=0", {}, InputError, "table of 3 random blocks per row cannot be drawn"),
)


def test_what_does_not_fit_is_refused(conversion_of) -> None:
    for model_type, spec, options, error, message in MISFITS:
        with named_case(model_type, spec), pytest.raises(error, match=message):
            conversion_of(model_type, spec, **options)
    with pytest.raises(ModelError, match=r'original_full.*\nLeave out attention, or set "attention_type"'):
        conversion_of("big_bird", "bigbird:mode=table", config={"attention_type": "original_full"})
    # The first special token is the mask, and of masks alone the original divides by zero.
    drops = {"position_embedding_type": "absolute", "token_dropout": True, "mask_token_id": 7}
    with pytest.raises(InputError, match=r"embeddings of .* ids 7 alone are NaN .*\nName another id, .*tokens=ID"):
        conversion_of("esm", "etc:global=2", config=drops)


def test_attention_that_is_dense_at_every_length_is_warned_of(conversion_of, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hdexport"):
        conversion_of("bert", "bigbird:block=4")
        assert caplog.text == ""
        conversion_of("bert", "bigbird:block=64")
    assert "Attention is dense up to 704 tokens, which covers every text of up to 300." in caplog.text


def test_a_bundle_holds_what_its_attention_was_made_of(tiny_bundles) -> None:
    """Bundles of test_converted_blocks.py."""
    for model_type, spec, last_block, names in (
        ("roberta", "bigbird:block=4,random=2,seed=5", "row", {"listed_blocks.npy"}),
        ("distilbert", "etc:global=3,block=64,tokens=9/8/7", None, {"global_embeddings.npy"}),
        ("bert", "bigbird:block=4,random=3", None, set()),
    ):
        bundle = open_bundle(tiny_bundles(model_type, attention=spec, last_block=last_block).path)
        assert {name for name in bundle.manifest.files if name.endswith(".npy")} == names
        record = recorded(bundle.manifest, "blocks")
        conversion = read_conversion(record, bundle)
        assert (conversion.record, conversion.is_native, conversion.padding) == (record, False, bundle.manifest.padding)
        assert (conversion.listed_blocks is None, conversion.global_embeddings is None) == (
            "listed_blocks.npy" not in names,
            "global_embeddings.npy" not in names,
        )
    assert recorded(open_bundle(tiny_bundles("bert").path).manifest, "blocks") is None
