"""Late chunking on tiny bundles: which tokens a chunk has, what they see, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import InputError, NonFiniteOutputError
from hdruntime.session import Session
from hdruntime.text.chunking import TextChunks
from support.comparators import assert_close, named_case
from support.job_runs import VOCABULARY, gather_bundle
from support.tiny_bundle import MAX_LEN, hidden_states

BundleMaker = Callable[..., Path]

ATOL = 1e-6

TEXT = "Long documents. Are read whole"
WORDS = [(0, 4), (5, 14), (14, 15), (16, 19), (20, 24), (25, 30)]
LONG = "long documents are read whole . " * 9


@pytest.fixture
def session(bundle_path: Path) -> Iterator[Session]:
    with hdruntime.load(bundle_path) as session:
        yield session


def spans_of(chunks: TextChunks) -> list[tuple[int, int]]:
    return list(zip(chunks.starts.tolist(), chunks.ends.tolist(), strict=True))


def by_hand(text: str, tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """The means of these tokens' states, of a text that fits; [CLS] is token 0."""
    ids = [VOCABULARY.index(word) for word in ("[CLS]", *text.lower().replace(".", " .").split(), "[SEP]")]
    (states,) = hidden_states(np.array([ids]))
    return np.stack([states[list(chunk)].mean(axis=0) for chunk in tokens])


CHUNKS = [
    ("tokens:1", WORDS, [[0, 1], [2], [3], [4], [5], [6, 7]]),
    ("tokens:4", [(0, 19), (20, 30)], [[0, 1, 2, 3, 4], [5, 6, 7]]),
    ("tokens:6", [(0, 30)], [range(8)]),
    ("sentences", [(0, 15), (16, 30)], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    # Overlapping, unsorted, with holes, borders within words and beside spaces
    ([(16, 25), (4, 15), (7, 9), (0, 5)], None, [[4, 5], [2, 3], [2], [0, 1]]),
    ([(0, 30), (13, 17), (29, 30)], None, [range(8), [2, 3, 4], [6, 7]]),
    ([], None, []),
]


def test_a_chunk_is_the_mean_of_its_tokens_states_in_the_whole_text(session: Session) -> None:
    for chunks, spans, tokens in CHUNKS:
        with named_case(chunks):
            found = session.embed_chunks(TEXT, chunks=chunks)
            assert spans_of(found) == (chunks if spans is None else spans)
            assert found.tokens.tolist() == [len(set(each) - {0, 7}) for each in tokens]
            assert (found.vectors.dtype, found.vectors.shape, len(found)) == (np.float32, (len(tokens), 4), len(tokens))
            if tokens:
                assert_close(found.vectors, by_hand(TEXT, tokens), atol=ATOL)
                with pytest.raises(AssertionError):  # the mean of all but one of its tokens
                    assert_close(found.vectors, by_hand(TEXT, [*tokens[:-1], [0, *tokens[-1]][:-1]]), atol=100 * ATOL)


def test_one_chunk_of_a_whole_text_is_what_embed_gives_and_smaller_ones_are_not_what_it_gives_alone(
    session: Session,
) -> None:
    texts = [TEXT, "read", LONG[:63], "whole ."]
    found = session.embed_chunks(texts, chunks=[[(0, len(text))] for text in texts], batch_tokens=20)
    assert_close(np.concatenate([each.vectors for each in found]), session.embed(texts), atol=ATOL)
    halves = session.embed_chunks(TEXT, chunks="sentences")
    alone = session.embed([TEXT[start:end] for start, end in spans_of(halves)])
    with pytest.raises(AssertionError):
        assert_close(halves.vectors, alone, atol=100 * ATOL)


def macro_chunks(words: int, overlap: int) -> list[range]:
    """The words of each macro chunk of a text, by hand."""
    room = MAX_LEN - 2
    found = [range(min(room, words))]
    while found[-1].stop < words:
        first = found[-1].start + room - overlap
        found.append(range(first, min(first + room, words)))
    return found


def states_by_hand(words: Sequence[str], overlap: int) -> np.ndarray:
    """[CLS], words and [SEP]: each state from the macro chunk where the word is farther from a border in the text."""
    parts = macro_chunks(len(words), overlap)
    states = []
    for part in parts:
        ids = [VOCABULARY.index(word) for word in ("[CLS]", *words[part.start : part.stop], "[SEP]")]
        states.append(hidden_states(np.array([ids]))[0])

    def context(number: int, word: int) -> float:
        before = np.inf if number == 0 else word - parts[number].start
        after = np.inf if number == len(parts) - 1 else parts[number].stop - 1 - word
        return min(before, after) if word in parts[number] else -1

    found = [states[0][0]]
    for word in range(len(words)):
        best = max(reversed(range(len(parts))), key=lambda number: context(number, word))
        found.append(states[best][1 + word - parts[best].start])
    return np.array([*found, states[-1][-1]])


@pytest.mark.parametrize("overlap", [0, 1, 13, None])
def test_a_long_text_is_run_in_macro_chunks_and_a_chunk_may_lie_across_their_seam(
    session: Session, overlap: int | None
) -> None:
    shared = MAX_LEN // 4 if overlap is None else overlap
    texts = [LONG, " ".join(LONG.split()[:15]), " ".join(LONG.split()[:14]), "long"]
    for number in (1, 3, 7, 100):
        found = session.embed_chunks(texts, chunks=f"tokens:{number}", overlap=overlap)
        for text, chunks in zip(texts, found, strict=True):
            words = text.split()
            states = states_by_hand(words, shared)
            firsts = range(0, len(words), number)
            assert [text[start:end].split() for start, end in spans_of(chunks)] == [
                words[first : first + number] for first in firsts
            ]
            ends = [first + number + 1 for first in firsts]
            tokens = [range(first + 1 if first else 0, end) for first, end in zip(firsts, ends, strict=True)]
            tokens[-1] = range(tokens[-1].start, len(states))
            assert_close(chunks.vectors, np.stack([states[list(each)].mean(axis=0) for each in tokens]), atol=ATOL)
    if shared:
        # A seam at the overlap's start would show.
        other = session.embed_chunks(LONG, chunks="tokens:1", overlap=shared - 1)
        with pytest.raises(AssertionError):
            assert_close(
                other.vectors, session.embed_chunks(LONG, chunks="tokens:1", overlap=overlap).vectors, atol=0.01
            )


def test_a_prompt_is_before_every_macro_chunk_and_offsets_do_not_count_it(session: Session) -> None:
    # The last makes one token with the text's first word.
    for prompt in ("read whole: ", "", "un"):
        with named_case(prompt):
            for text in (TEXT, LONG):
                found = session.embed_chunks(text, chunks="tokens:2", prompt=prompt)
                assert spans_of(found) == spans_of(session.embed_chunks(text, chunks="tokens:2", prompt=""))
                assert found.starts[0] == 0
            whole = session.embed_chunks(TEXT, chunks=[(0, len(TEXT))], prompt=prompt)
            assert_close(whole.vectors, session.embed([TEXT], prompt=prompt), atol=ATOL)
            assert whole.tokens.tolist() == [6]
            if prompt:
                with pytest.raises(AssertionError):
                    assert_close(whole.vectors, session.embed([TEXT]), atol=100 * ATOL)


def test_a_text_without_tokens_has_no_chunk(session: Session) -> None:
    for chunks in ("tokens:3", "sentences", []):
        found = session.embed_chunks(["", "  \n ", "read"], chunks=chunks if isinstance(chunks, str) else [[]] * 3)
        assert [len(each) for each in found] == [0, 0, int(isinstance(chunks, str))]
        assert found[0].vectors.shape == (0, 4)
    assert session.embed_chunks([], chunks="sentences") == []


def test_characters_of_several_bytes_and_spaces_in_tokens(new_bundle: BundleMaker) -> None:
    """With a tokenizer of bytes, whose tokens begin with the space before a word, and split a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", "a"), ("\u0120a", "b")]
    vocabulary = {word: index for index, word in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    table = np.random.default_rng(3).standard_normal((len(vocabulary), 4))
    bundle = gather_bundle(new_bundle(), "feature-extraction", {"last_hidden_state": table})
    manifest = dataclasses.replace(open_bundle(bundle).manifest, vocab_size=len(vocabulary))
    tokenizer.save(str(bundle / "tokenizer.json"))
    seal(bundle, manifest)
    text = "é ab\N{GRINNING FACE} ab"
    of_bytes = {"é": 2, " ab": 1, "\N{GRINNING FACE}": 4}
    with hdruntime.load(bundle) as session:
        ids = session.tokenize([text])[0].input_ids
        assert len(ids) == of_bytes["é"] + 2 + of_bytes["\N{GRINNING FACE}"]
        # The token " ab" is at 2 to 4, not from the space on; all four bytes of the face are at 4 to 5.
        for chunks, tokens in (
            ([(0, 1), (2, 4), (4, 5), (6, 8)], [[0, 1], [2], [3, 4, 5, 6], [7]]),
            ([(0, 8)], [range(8)]),
        ):
            found = session.embed_chunks(text, chunks=chunks)
            assert found.tokens.tolist() == [len(each) for each in tokens]
            expected = np.stack([table[np.array(ids)[list(each)]].mean(axis=0) for each in tokens])
            assert_close(found.vectors, expected, atol=ATOL)
        by_tokens = session.embed_chunks(text, chunks="tokens:3")
        assert spans_of(by_tokens) == [(0, 4), (4, 5), (4, 8)]  # the face's bytes are in two chunks
        with pytest.raises(InputError, match=r"The chunk \[1, 2\] has no token: ' '.\nLeave it out."):
            session.embed_chunks(text, chunks=[(0, 1), (1, 2)])


CHUNKS_THAT_DO_NOT_FIT = [
    ([(0, 31)], r"^Chunk 0 is \[0, 31\]; the text has 30 characters\.\nGive 0 <= start < end <= 30"),
    ([(0, 4), (-1, 4)], r"^Chunk 1 is \[-1, 4\]"),
    ([(5, 5)], r"^Chunk 0 is \[5, 5\]"),
    ([(0, 4, 5)], r"^Chunk 0 is \(0, 4, 5\); it must be a pair of whole numbers: \[start, end\], in characters\.$"),
    ([(0, 4.0)], r"^Chunk 0 is \(0, 4\.0\); it must be a pair"),
    ([0, 4], r"^Chunk 0 is 0; it must be a pair"),
    (None, r"^chunks is of type NoneType; it must have \(start, end\) of each chunk"),
    ([(4, 5)], r"^The chunk \[4, 5\] has no token: ' '\.\nLeave it out\.$"),
    ("words", r"^There is no rule 'words' for chunks\.\nUse 'tokens:256' \(any number\), 'sentences', or"),
    ("tokens:0", r"^'tokens:0' has no valid number of tokens per chunk\.\nWrite, for example, tokens:256\.$"),
    ("tokens:", "no valid number"),
]


def test_chunks_that_do_not_fit_are_refused(session: Session) -> None:
    for chunks, message in CHUNKS_THAT_DO_NOT_FIT:
        with named_case(message):
            with pytest.raises(InputError, match=message):
                session.embed_chunks(TEXT, chunks=chunks)
            if not isinstance(chunks, str):
                with pytest.raises(InputError, match=message.replace("^", r"^texts\[1\]: ")):
                    session.embed_chunks(["long", TEXT], chunks=[[(0, 4)], chunks])


def test_what_else_does_not_fit_is_refused(session: Session) -> None:
    with pytest.raises(InputError, match=r"There are 2 texts, but chunks of 1; give chunks of each"):
        session.embed_chunks(["long", "read"], chunks=[[(0, 4)]])
    with pytest.raises(InputError, match=r"with a stride or overlap of 14 tokens; it must be 0 to 13"):
        session.embed_chunks(["long", LONG], chunks="sentences", overlap=14)
    with pytest.raises(NonFiniteOutputError, match=r"^texts\[1\]: The output last_hidden_state holds NaN"):
        session.embed_chunks(["long", "read nan", "read"], chunks="sentences")


def sentence_bundle(new_bundle: BundleMaker, name: str, **settings: Any) -> Path:
    bundle = new_bundle(name, task="sentence-similarity")
    sentence = SentenceSettings(kind="encoder", max_seq_length=16, **settings)
    seal(bundle, dataclasses.replace(open_bundle(bundle).manifest, sentence=sentence))
    return bundle


def test_a_sentence_models_chunks_are_normalised_where_its_vectors_are(new_bundle: BundleMaker) -> None:
    expected = by_hand(TEXT, [[0, 1, 2, 3], [4, 5, 6, 7]])
    for normalize in (False, True):
        with hdruntime.load(
            sentence_bundle(new_bundle, f"{normalize}", pooling=("mean",), normalize=normalize)
        ) as session:
            found = session.embed_chunks(TEXT, chunks="sentences").vectors
        lengths = np.linalg.norm(expected, axis=1, keepdims=True) if normalize else 1
        assert_close(found, expected / lengths, atol=ATOL)


def test_models_of_other_pooling_are_refused_with_the_reason(new_bundle: BundleMaker) -> None:
    bundles = {
        "pools tokens by cls and mean.\nUse a model of mean": sentence_bundle(new_bundle, "1", pooling=("cls", "mean")),
        "has a Dense layer or LayerNorm after": sentence_bundle(new_bundle, "2", pooling=("mean",), dense=True),
        "does not state how it pools tokens.\nBuild it again.": new_bundle("3", task="sentence-similarity"),
    }
    needs = "Late chunking needs a model that pools by the mean of all tokens; this bundle "
    for reason, bundle in bundles.items():
        with hdruntime.load(bundle) as session, pytest.raises(InputError, match=needs + reason):
            session.embed_chunks(["long"], chunks="sentences")
