"""Late chunking of the sample model: what transformers' model gives, pooled by hand.

Texts of several macro chunks: text/test_chunking.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime.session import Session
from hdruntime.text.chunking import TextChunks
from support.comparators import assert_close
from support.sentence_bundles import with_settings_of

ATOL = 1e-6
"""Measured: 2.4e-7. What is promised is ten times this."""

WORDS = " ".join(topics.values()).split()

TEXTS = {
    "one token": "hello",
    "15 tokens": "the " * 15,
    "16 tokens": "the cat sat on the mat and " * 2 + "ran .",
    "17 tokens": "the dog " * 8 + "slept",
    "33 tokens": "a b c " * 11,
    "bytes": "\u00dcberraschung! \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002"
    "\u554f\u984c\uff1f na\u00efve caf\u00e9 \N{GRINNING FACE} 12,345.67. Ok",
    "fits": " ".join(WORDS[:250]),
}  # fmt: skip

SENTENCE_ENDS = ["g!", "\u30c8\u3002", "\u984c\uff1f", "7.", "Ok"]

Range = Sequence[int]


class ByHand:
    """Late chunking with transformers: states of all tokens, then means by offsets."""

    def __init__(self, checkpoint: Path) -> None:
        import transformers

        self.model = transformers.AutoModel.from_pretrained(str(checkpoint)).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint), model_max_length=10**6)

    def tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets, special tokens included."""
        encoded = self.tokenizer(text, return_offsets_mapping=True, truncation=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def vectors(self, text: str, spans: Sequence[Range], *, shift: int = 0) -> np.ndarray:
        """[spans, 384], of length 1, of a text that fits; ``shift`` takes the wrong tokens."""
        import torch

        ids, offsets = self.tokens(text)
        with torch.inference_mode():
            states = self.model(torch.tensor([ids])).last_hidden_state[0].numpy()
        found = []
        for start, end in spans:
            inside = [number for number, (first, last) in enumerate(offsets) if first < end and last > start]
            inside = [number for number in inside if 0 < number < len(ids) - 1]
            if inside[0] == 1:
                inside.insert(0, 0)
            if inside[-1] == len(ids) - 2:
                inside.append(len(ids) - 1)
            mean = states[[(number + shift) % len(ids) for number in inside]].mean(axis=0)
            found.append(mean / np.linalg.norm(mean))
        return np.array(found)

    def spans_of_tokens(self, text: str, number: int) -> list[tuple[int, int]]:
        offsets = self.tokens(text)[1][1:-1]
        groups = [offsets[first : first + number] for first in range(0, len(offsets), number)]
        return [(group[0][0], group[-1][1]) for group in groups]


@pytest.fixture(scope="module")
def by_hand(extended_sample: Path) -> ByHand:
    """Of a model with more positions than it was trained for."""
    return ByHand(extended_sample)


@pytest.fixture(scope="module")
def session(sample_bundle: Path) -> Iterator[Session]:
    with hdruntime.load(sample_bundle, max_seq_length="bundle") as session:
        yield session


def spans_of(chunks: TextChunks) -> list[tuple[int, int]]:
    return list(zip(chunks.starts.tolist(), chunks.ends.tolist(), strict=True))


def test_chunks_of_tokens_are_those_by_hand(session: Session, by_hand: ByHand) -> None:
    texts = list(TEXTS.values())
    for text, chunks in zip(texts, session.embed_chunks(texts, chunks="tokens:16", batch_tokens=2000), strict=True):
        spans = by_hand.spans_of_tokens(text, 16)
        assert spans_of(chunks) == spans
        assert_close(chunks.vectors, by_hand.vectors(text, spans), atol=ATOL)
    assert [len(by_hand.tokens(text)[0]) - 2 for text in texts[:5]] == [1, 15, 16, 17, 33]
    alone = session.embed([text[start:end] for start, end in spans])
    for wrong in (by_hand.vectors(text, spans, shift=1), alone):
        with pytest.raises(AssertionError):
            assert_close(chunks.vectors, wrong, atol=1000 * ATOL)


@pytest.mark.parametrize("name", ["bytes", "fits"])
def test_sentences_and_given_chunks_are_those_by_hand(session: Session, by_hand: ByHand, name: str) -> None:
    text = TEXTS[name]
    found = session.embed_chunks(text, chunks="sentences")
    if name == "bytes":
        assert [text[start:end][-2:] for start, end in spans_of(found)] == SENTENCE_ENDS
    assert_close(found.vectors, by_hand.vectors(text, spans_of(found)), atol=ATOL)
    # Unsorted, overlapping, and with holes.
    size = len(text)
    spans = [(size // 2, size // 2 + size // 4), (0, 9), (size // 3, size - 1), (size - 2, size), (5, 12), (0, size)]
    found = session.embed_chunks([text, "hello"], chunks=[spans, [(0, 5)]])[0]
    assert spans_of(found) == spans
    assert_close(found.vectors, by_hand.vectors(text, spans), atol=ATOL)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_a_prompt_is_pooled_with_the_first_chunk_as_embed_pools_it(
    tiny_bundles: Callable[..., Any], tmp_path: Path, include_prompt: bool
) -> None:
    from hdexport.build import BuildOptions, build
    from support.tiny_models import change_json

    plain = tiny_bundles("bert", "sentence-similarity")
    model = Path(shutil.copytree(plain.checkpoint, tmp_path / "checkpoint"))
    prompts = {"query": "w30 w31: ", "document": ""}
    change_json(model / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    bundle = tmp_path / "bundle"
    if include_prompt:
        with_settings_of(model, plain.path, bundle)
    else:
        change_json(model / "1_Pooling" / "config.json", include_prompt=False)
        build(BuildOptions(model=model, output=bundle, max_len=64, verify=None))
    text = "w1 w2 w3 w4 w5"
    with hdruntime.load(bundle) as session:
        for options in ({}, {"prompt": "w40 "}, {"prompt": ""}, {"prompt_name": "document"}):
            whole = session.embed_chunks(text, chunks=[(0, len(text)), (0, 2), (3, 5)], **options)  # type: ignore[call-overload]
            assert whole.tokens.tolist() == [5, 1, 1]
            assert_close(whole.vectors[:1], session.embed([text], **options), atol=ATOL)  # type: ignore[arg-type]
        # [CLS] goes with the prompt. With neither, the first token stands alone, as the second always does.
        outputs = session.infer(session.tokenize([text], prompt="w30 w31: "))[0]["last_hidden_state"]
        found = session.embed_chunks(text, chunks="tokens:1").vectors
        for chunk, tokens in enumerate([range(0 if include_prompt else 4, 5), [5], [6], [7], [8, 9]]):
            mean = outputs[list(tokens)].mean(axis=0)
            assert_close(found[chunk], mean / np.linalg.norm(mean), atol=ATOL)
