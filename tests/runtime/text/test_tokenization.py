"""Text becomes ids by the bundle's tokenizer, without the limits that its file carries."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from hdruntime.bundle.manifest import Side
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.tokenization import TextTokenizer
from hdruntime.text.tokenizer_file import copied_tokenizer
from support.comparators import named_case
from support.file_tokenizers import TOKENIZERS, word_pieces
from support.job_runs import forget_unknown_token

CLS, SEP = 2, 3


@pytest.fixture
def tokenizer(bundle_path: Path) -> TextTokenizer:
    return TextTokenizer(bundle_path / "tokenizer.json", max_len=16)


def words(count: int) -> str:
    return " ".join(["long"] * count)


def test_the_files_own_truncation_and_padding_are_switched_off(bundle_path: Path, tokenizer: TextTokenizer) -> None:
    as_saved = Tokenizer.from_file(str(bundle_path / "tokenizer.json"))
    assert [len(as_saved.encode(text).ids) for text in ("", words(14))] == [8, 8]
    assert [len(item) for item in tokenizer.encode(["", words(14)])] == [2, 16]


def test_an_empty_text_is_its_special_tokens(tokenizer: TextTokenizer) -> None:
    assert tokenizer.encode([""]) == [Encoding([CLS, SEP], [0, 0], [(0, 0), (0, 0)], [None, None])]


def test_offsets_count_characters_of_the_text(tokenizer: TextTokenizer) -> None:
    text = "Käse: LONG documents."
    (encoding,) = tokenizer.encode([text])
    found = [text[start:end] for start, end in encoding.offsets]
    assert found == ["", "Käse", ":", "LONG", "documents", ".", ""]
    assert encoding.sequence_ids == [None, 0, 0, 0, 0, 0, None]


def test_a_pair_has_types_and_its_own_offsets(tokenizer: TextTokenizer) -> None:
    (encoding,) = tokenizer.encode(["long"], ["documents are"])
    assert encoding.token_type_ids == [0, 0, 0, 1, 1, 1]
    assert encoding.sequence_ids == [None, 0, None, 1, 1, None]
    assert encoding.offsets == [(0, 0), (0, 4), (0, 0), (0, 9), (10, 13), (0, 0)]


def test_a_text_that_just_fits_is_kept_whole_and_so_is_one_to_be_split(tokenizer: TextTokenizer) -> None:
    for overflow in Overflow:
        assert [len(encoding) for encoding in tokenizer.encode([words(14)], overflow=overflow)] == [16]
    assert [len(item) for item in tokenizer.encode([words(500), ""], overflow="split")] == [502, 2]


def test_too_long_a_text_is_refused_with_its_length(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InputError, match=r"Text 1 has 17 tokens; .* 1 to 16\.\n.*max_len=17"):
        tokenizer.encode(["long", words(15)])


def test_truncation_keeps_the_special_tokens(tokenizer: TextTokenizer) -> None:
    (encoding,) = tokenizer.encode([words(500)], overflow="truncate")
    assert len(encoding) == 16
    assert (encoding.input_ids[0], encoding.input_ids[-1]) == (CLS, SEP)
    assert SEP not in encoding.input_ids[:-1]


def test_a_text_is_not_cut_to_fewer_tokens_than_the_special_ones(tokenizer: TextTokenizer) -> None:
    for tokens, pairs, least in ((1, None, 3), (2, ["read"], 4)):
        with pytest.raises(
            InputError, match=rf"truncated to {tokens} tokens: it has {least - 1} .*\nBuild .*max_len={least}"
        ):
            tokenizer.limited(tokens).encode([words(20)], pairs, overflow="truncate")


def test_truncation_cuts_the_longer_of_a_pair(tokenizer: TextTokenizer) -> None:
    (encoding,) = tokenizer.encode(["documents"], [words(500)], overflow="truncate")
    assert len(encoding) == 16
    assert encoding.token_type_ids == [0, 0, 0] + [1] * 13
    assert encoding.input_ids.count(SEP) == 2


def test_threads_with_and_without_truncation_do_not_disturb_each_other(tokenizer: TextTokenizer) -> None:
    def length(task: int) -> int:
        if task % 2:
            return len(tokenizer.encode([words(20 + task)], overflow="truncate")[0])
        try:
            tokenizer.encode([words(20 + task)])
        except InputError as error:
            return int(str(error).split()[3])
        return -1

    with ThreadPoolExecutor(8) as pool:
        lengths = list(pool.map(length, range(200)))
    assert lengths == [16 if task % 2 else 22 + task for task in range(200)]


NO_LISTS = [
    (["\ud800"], None, r"texts\[0\] is not valid Unicode"),
    (["a"], "b", "pairs is one string"),
    (["a", "b"], ["c"], "2 texts but 1 pairs"),
]


@pytest.mark.parametrize("make", dict.fromkeys(case.file for case in TOKENIZERS))
def test_a_copy_is_written_as_the_original_and_has_a_limit_of_its_own(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.add_tokens([AddedToken("added", single_word=True), AddedToken("[X]", lstrip=True, special=True)])
    copy = copied_tokenizer(tokenizer)
    assert copy.to_str() == tokenizer.to_str()
    copy.enable_truncation(3)
    assert tokenizer.truncation is None


def test_a_copy_takes_no_memory_for_another_model() -> None:
    tokenizer = word_pieces()
    copy = copied_tokenizer(tokenizer)
    copy.model.unk_token = "a"
    assert tokenizer.model.unk_token == "a", "both have one model"


def test_what_is_no_list_of_texts_is_refused(tokenizer: TextTokenizer) -> None:
    for texts, pairs, message in NO_LISTS:
        with named_case(message), pytest.raises(InputError, match=message):
            tokenizer.encode(texts, pairs)


def test_a_tokenizer_that_cannot_be_read_is_explained(new_bundle: Callable[..., Path]) -> None:
    path = new_bundle() / "tokenizer.json"
    path.write_text('{"version": "9.0"}')
    with pytest.raises(BundleCorruptError, match=r"cannot be read: .*\n.*pip install -U tokenizers"):
        TextTokenizer(path, max_len=16).encode(["long"])


def test_a_tokenizer_that_takes_one_of_two_ids_at_each_load_is_refused(new_bundle: Callable[..., Path]) -> None:
    """Of a bundle that was built before builds refused the checkpoint."""
    path = new_bundle() / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Lowercase()
    tokens = [AddedToken(content, normalized=True) for content in ("COVIDx", "other", "covidx", "CovidX")]
    tokenizer.add_tokens(tokens)
    first = tokenizer.token_to_id("COVIDx")
    tokenizer.save(str(path))
    names = rf"'COVIDx' \({first}\) and 'covidx' \({first + 2}\) and 'CovidX' \({first + 3}\)"
    message = (
        rf"random ids: its normalizer makes 'covidx' of each of the added tokens {names}(.|\n)*Build the bundle again"
    )
    with pytest.raises(BundleCorruptError, match=message):
        TextTokenizer(path, max_len=16)


def test_added_tokens_that_differ_after_the_normalizer_or_skip_it_are_read(new_bundle: Callable[..., Path]) -> None:
    path = new_bundle() / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    # Tokens without a letter are never found.
    tokenizer.add_tokens([AddedToken(content, normalized=True) for content in ("COVIDx", "other", "\u0301", "\u0300")])
    tokenizer.add_tokens([AddedToken("covidx", normalized=False)])
    tokenizer.save(str(path))
    (loaded,) = {repr(TextTokenizer(path, max_len=16).encode(["COVIDx covidx Covidx e\u0301"])) for _ in range(20)}
    upper, lower = (tokenizer.token_to_id(content) for content in ("COVIDx", "covidx"))
    assert f"[{CLS}, {upper}, {lower}, {upper}, " in loaded


def test_a_tokenizer_that_leaves_merges_out_at_random_is_refused(new_bundle: Callable[..., Path]) -> None:
    path = new_bundle() / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)).save(str(path))
    with pytest.raises(BundleCorruptError, match=r"random ids: its model has the dropout 0\.5"):
        TextTokenizer(path, max_len=16)


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece"])
def test_a_text_that_the_tokenizer_cannot_encode_is_named(bundle_path: Path, model: str) -> None:
    forget_unknown_token(bundle_path, model=model)
    tokenizer = TextTokenizer(bundle_path / "tokenizer.json", max_len=16)
    reason = "cannot be encoded by the bundle's tokenizer: .*\\[UNK\\].*\nLeave it out, or build"
    for overflow in Overflow:
        with named_case(overflow):
            assert len(tokenizer.encode(["long", "read"], overflow=overflow)) == 2
            with pytest.raises(InputError, match=f"^Text 2 {reason}"):
                tokenizer.encode(["long", "read", "never seen", "nor this"], overflow=overflow)
            with pytest.raises(InputError, match=f"^Text 1 {reason}"):
                tokenizer.encode(["long", "read"], ["whole", "never seen"], overflow=overflow)
            with pytest.raises(InputError, match=f"^The text {reason}"):
                tokenizer.encode(["never seen"], overflow=overflow)


@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_and_pairs_are_cut_at_the_checkpoints_side(bundle_path: Path, side: Side) -> None:
    tokenizer = TextTokenizer(bundle_path / "tokenizer.json", max_len=6, truncation_side=side)
    text = "read long documents whole read long"
    (cut,), (whole,) = (each.encode([text], overflow="truncate") for each in (tokenizer, tokenizer.limited(99)))
    inside = whole.input_ids[1:-1]
    assert cut.input_ids == [CLS, *(inside[:4] if side == "right" else inside[-4:]), SEP]
    assert (cut.is_truncated, whole.is_truncated) == (True, False)
    (pair,) = tokenizer.encode(["read"], [text], overflow="truncate")
    assert pair.input_ids[-3:-1] == (inside[:2] if side == "right" else inside[-2:])
