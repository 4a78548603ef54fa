"""What int8 is calibrated with: every kind that widens ranges, and nothing of what is checked."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

import hdruntime
from hdexport.quantize.selection import float_graph
from hdexport.quantize.texts import CalibrationTexts, calibration_texts, docstrings
from hdexport.verify.single_texts import single_text_runner
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.text.tokenization import TextTokenizer
from support.tiny_bundle import WORDS, make_bundle

CLS, SEP, STOP = (WORDS.index(word) for word in ("[CLS]", "[SEP]", "."))
TEXT_WORDS = [WORDS.index(word) for word in ("long", "documents", "are", "read")]
"""One for each text; the fourth is checked."""

docstrings_once = functools.cache(docstrings)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    found = open_bundle(make_bundle(tmp_path_factory.mktemp("texts") / "bundle"))
    return Bundle(found.path, dataclasses.replace(found.manifest, max_len=1000))


@pytest.fixture
def texts(bundle: Bundle, tmp_path: Path, parsed_once: None) -> CalibrationTexts:
    """Each of a word of its own, in 30 sentences of 3 and 30 of 5 words, each with a full stop: 300 tokens."""
    file = tmp_path / "texts.txt"
    parts = [(WORDS[word], f"{WORDS[word]} " * 3, f"{WORDS[word]} " * 5) for word in TEXT_WORDS]
    file.write_text("".join(f"{short}. {long}. " * 30 + "\n" for _, short, long in parts), encoding="utf-8")
    return calibration_texts(bundle, file)


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library's sources take a second to parse."""
    monkeypatch.setattr("hdexport.quantize.texts.docstrings", docstrings_once)


def words_of(ids: np.ndarray) -> set[int]:
    return set(ids.tolist()) & set(TEXT_WORDS)


def test_nothing_that_is_checked_calibrates(texts: CalibrationTexts) -> None:
    assert set().union(*map(words_of, texts.ids)) == set(TEXT_WORDS[:3])
    assert set().union(*map(words_of, texts.checked)) == {TEXT_WORDS[3]}


def test_texts_are_whole_cut_and_short_and_end_with_the_separator(texts: CalibrationTexts) -> None:
    assert [len(ids) for ids in texts.ids[:3]] == [302, 160, 160]
    assert {2, 3, 5, 16, 65} <= {len(ids) for ids in texts.ids}
    assert len(texts.ids[-1]) == 3 * 300 + 2, "a long text is all of those that calibrate"
    assert {(int(ids[0]), int(ids[-1])) for ids in (*texts.ids, *texts.checked)} == {(CLS, SEP)}


@pytest.mark.parametrize("count", [3, 5])
def test_sentences_calibrate_too(texts: CalibrationTexts, count: int) -> None:
    sentences = [[CLS, *[word] * count, STOP, SEP] for word in TEXT_WORDS]
    assert [each in [ids.tolist() for ids in texts.ids] for each in sentences] == [True, True, True, False]


def test_a_long_text_without_full_stops_takes_no_time_that_grows_with_its_square(bundle: Bundle, tmp_path) -> None:
    """As languages without full stops have them; a million letters took hours, and these would take many minutes."""
    (tmp_path / "text.txt").write_text("long " * 40_000 + "\n", encoding="utf-8")
    found = calibration_texts(bundle, tmp_path / "text.txt")
    assert len(found.ids[0]) == 512
    assert all(set(ids.tolist()) <= {CLS, WORDS.index("long"), SEP} for ids in (*found.ids, *found.checked))


@pytest.mark.parametrize("longest", [4, 1000])
def test_a_few_tokens_are_run_behind_padding_as_far_as_the_model_goes(bundle: Bundle, longest: int) -> None:
    short = Bundle(bundle.path, dataclasses.replace(bundle.manifest, max_len=longest))
    found = calibration_texts(short, None).behind_padding
    assert all(1 <= len(ids) <= 3 and padding + len(ids) <= longest for padding, ids in found)
    near = {each for each in (1, 2, 3, 5, 9, 17, 33, 64) if each < longest}
    assert {padding for padding, _ in found} == {*near, *({3} if longest == 4 else {499, 999})}


def test_the_first_token_is_alone_behind_every_padding_and_at_the_longest_text_s_end(
    texts: CalibrationTexts,
) -> None:
    alone = [padding for padding, ids in texts.behind_padding if ids.tolist() == [CLS]]
    assert sorted(alone) == [1, 2, 3, 5, 9, 17, 33, 64, 499, 999]


def test_pieces_of_what_is_checked_are_no_longer_than_the_model_takes(bundle: Bundle, tmp_path) -> None:
    (tmp_path / "text.txt").write_text("long " * 2500 + "\n", encoding="utf-8")
    short = Bundle(bundle.path, dataclasses.replace(bundle.manifest, max_len=600))
    found = calibration_texts(short, tmp_path / "text.txt")
    chunks = found.checked[-5:]
    assert [len(ids) for ids in chunks] == [600, 600, 600, 600, 2500 - 4 * 598 + 2]
    assert {(int(ids[0]), int(ids[-1])) for ids in chunks} == {(CLS, SEP)}


@pytest.mark.parametrize(("width", "chunks"), [(30_522, 1), (250_002, 0)])
def test_answers_of_long_texts_that_are_checked_fit_in_memory(
    bundle: Bundle, tmp_path, width: int, chunks: int
) -> None:
    (tmp_path / "text.txt").write_text("long documents. " * 7_000 + "\n", encoding="utf-8")
    outputs = tuple(
        dataclasses.replace(spec, shape=(*spec.shape[:-1], width)) if spec.has_tokens_axis else spec
        for spec in bundle.manifest.outputs
    )
    wide = Bundle(bundle.path, dataclasses.replace(bundle.manifest, max_len=4096, outputs=outputs))
    found = calibration_texts(wide, tmp_path / "text.txt")
    assert sum(len(ids) == 2048 for ids in found.checked) == chunks


def test_docstrings_widen_ranges(bundle: Bundle, texts: CalibrationTexts) -> None:
    found = docstrings_once()
    assert len(found) > 40
    tokenizer = TextTokenizer(bundle.file("tokenizer.json"), max_len=64)
    (first,) = tokenizer.encode(found[:1], overflow="truncate")
    assert list(first.input_ids) in [ids.tolist() for ids in texts.rare]


def test_padding_in_front_is_what_sessions_pad_with(tiny_bundles) -> None:
    bundle = open_bundle(tiny_bundles("bert").path)
    text = np.random.default_rng(0).integers(5, bundle.manifest.vocab_size, 4)
    (name, *_) = [spec.name for spec in bundle.manifest.result_outputs]
    run = single_text_runner(bundle, float_graph(bundle))
    with hdruntime.load(bundle.path, backend="onnxruntime", threads=1) as session:
        for padding in (0, 3):
            ids = np.concatenate([np.zeros(padding, np.int64), text])[None]
            mask = (np.arange(padding + len(text)) >= padding).astype(np.int64)[None]
            expected = session(input_ids=ids, attention_mask=mask)[name][:, padding:]
            np.testing.assert_allclose(run([name], text, padding=padding)[name][:, padding:], expected, atol=1e-5)
        alone = run([name], text)[name]
    assert np.abs(alone - expected).max() > 1e-3, "behind padding, positions are others"
