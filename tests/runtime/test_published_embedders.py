"""Embedders that were generators, in the layouts that they are published in: the vectors of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hdruntime import SentenceEncoder
from hdruntime.bundle.reader import open_bundle
from support.comparators import assert_close
from support.made_once import made_once
from support.published_embedders import LAYOUTS, POSITIONS, save_published_embedder

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 2e-6
"""Measured: 6e-7."""

LONG = "The Spree flows through Berlin, past museums, and 3.8 million people live there. " * 12
TEXTS = ["How many people live in Berlin?", "", LONG, "a", LONG[:90], "\n\n", "e\u0301t\u00e9, \u4e2d\u6587 \U0001f642"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a layout -> a folder with a tiny model as ``checkpoint``, and with its ``bundle``."""

    def save_and_build(name: str) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            from hdexport.build import BuildOptions, build

            save_published_embedder(directory / "checkpoint", LAYOUTS[name])
            options = {"max_len": POSITIONS, "verify": None, "unverified": True}
            build(BuildOptions(model=directory / "checkpoint", output=directory / "bundle", **options))

        return make

    return lambda name: made_once(tmp_path_factory, f"published embedder {name}", save_and_build(name))


@pytest.mark.parametrize("name", LAYOUTS)
def test_vectors_are_those_of_sentence_transformers(saved: Callable[[str], Path], name: str) -> None:
    """With the model's prompts and a caller's, of texts that are cut and others, and in batches padded on the left."""
    directory, layout = saved(name), LAYOUTS[name]
    theirs = sentence_transformers.SentenceTransformer(str(directory / "checkpoint"), device="cpu")
    assert theirs.tokenizer.padding_side == "left"
    with SentenceEncoder(directory / "bundle", backend="onnxruntime") as ours:
        assert ours.max_seq_length == theirs.max_seq_length
        for options in (
            {},
            {"prompt": "Instruct: sort them\nQuery: "},
            *({"prompt_name": each} for each in ours.prompts),
        ):
            expected = theirs.encode(TEXTS, **options)
            assert_close(ours.encode(TEXTS, **options), expected, atol=ATOL)
            with pytest.raises(AssertionError):
                assert_close(ours.encode(TEXTS[::-1], **options), expected, atol=100 * ATOL)
        assert_close(ours.encode_query(TEXTS), theirs.encode_query(TEXTS), atol=ATOL)
        assert_close(ours.encode_document(TEXTS), theirs.encode_document(TEXTS), atol=ATOL)
        of_prompt = next(prompt for prompt in layout.prompts if layout.prompts[prompt])
        with_prompt = ours.encode(TEXTS, prompt_name=of_prompt)
        assert np.abs(with_prompt - ours.encode(TEXTS)).max() > 100 * ATOL, "the prompt is read"
        ours.max_seq_length = theirs.max_seq_length = 20
        assert_close(ours.encode(TEXTS), theirs.encode(TEXTS), atol=ATOL)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_have_the_tokens_that_the_layout_adds(saved: Callable[[str], Path], name: str) -> None:
    directory, layout = saved(name), LAYOUTS[name]
    theirs = sentence_transformers.SentenceTransformer(str(directory / "checkpoint"), device="cpu")
    with SentenceEncoder(directory / "bundle", backend="onnxruntime") as ours:
        for text in TEXTS:
            found = ours.preprocess([text])["input_ids"][0].tolist()
            assert found == theirs.preprocess([text])["input_ids"][0].tolist()
            if layout.end:
                assert found[-1] == theirs.tokenizer.convert_tokens_to_ids(layout.end), "also where a text is cut"
    settings = open_bundle(directory / "bundle").manifest.sentence
    assert settings is not None
    assert settings.pooling == (layout.pooling.removesuffix("_tokens"),)
    assert (settings.normalize, settings.prompts) == (True, layout.prompts)
