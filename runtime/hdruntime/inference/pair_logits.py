"""Logits of pairs of texts, a window of pairs at a time, long second texts in pieces; documents ranked by scores."""

from __future__ import annotations

__all__ = ["PairOptions", "check_query", "pair_logits", "ranked"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.errors import InputError
from hdruntime.inference.scheduling import BatchResult
from hdruntime.text.checks import checked_choice
from hdruntime.text.splitting import SplitEncoding, SplitPooling, in_one_piece, pooled_logits, split_encodings
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

_WINDOW_PAIRS = 4096
_WINDOW_CHARACTERS = 2_000_000
"""Pairs that are tokenised at a time: half a million tokens are about 100 MB as lists of ids and offsets."""

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How pairs are read.

    Attributes:
        overflow: the treatment of a pair of too many tokens: ``error``; ``truncate``, which cuts the end of the longer
            text; or ``split``, which runs the second text in pieces, each with the whole first text.
        stride: tokens that a piece repeats from the previous piece.
        split_pooling: combines the pieces' logits: the largest, or the mean weighted by tokens.
        prompt: goes before every first text.

    Raises:
        InputError: an option is unknown, the overflow is ``recur``, or only ``split`` has a stride.
    """

    overflow: Overflow | str = Overflow.ERROR
    stride: int = 0
    split_pooling: SplitPooling | str = SplitPooling.MAX
    prompt: str = ""

    def __post_init__(self) -> None:
        checked_choice(SplitPooling, self.split_pooling, option="split_pooling")
        if checked_choice(Overflow, self.overflow, option="overflow") is Overflow.RECUR:
            raise InputError("overflow is 'recur', but pairs are not streamed; use 'error', 'truncate' or 'split'.")
        if self.stride and self.overflow != Overflow.SPLIT:
            raise InputError(f"stride is {self.stride}, but only overflow='split' has a stride.")


def pair_logits(
    pairs: Sequence[Pair],
    tokenizer: TextTokenizer,
    run: Callable[[list[Encoding]], Iterator[BatchResult]],
    *,
    labels: int,
    options: PairOptions,
    name: str,
    on_done: Callable[[int], None] = lambda pairs: None,
) -> FloatArray:
    """The logits of a text-classification bundle for pairs of texts.

    Args:
        pairs: first and second texts; each may be empty.
        tokenizer: with the limit on tokens of a pair, or of a piece.
        run: yields the batches of encodings, each with the output ``logits``.
        labels: logits of a pair.
        options: see `PairOptions`.
        name: the pairs' in an error: ``documents[3]: ...``.
        on_done: takes the number of pairs of each window that is done.

    Returns:
        float32 [pairs, labels].

    Raises:
        InputError: a text is not a string, or does not fit.
        NonFiniteOutputError: a logit is NaN or infinite.
        BackendError: the backend failed, or the session is closed.
    """
    for place, pair in enumerate(pairs):
        for text in pair:
            if not isinstance(text, str):
                raise InputError(f"{name}[{place}] has a text of type {type(text).__name__}; it must be a string.")
    logits = np.empty((len(pairs), labels), np.float32)
    for window in _windows(pairs):
        splits = _encoded(pairs, window, tokenizer, options, name)
        pieces = [(place, piece) for place, split in zip(window, splits, strict=True) for piece in split.pieces]
        of_pieces = np.empty((len(pieces), labels), np.float32)
        for result in run([piece for _, piece in pieces]):
            for row, error in result.errors.items():
                raise type(error)(f"{name}[{pieces[row][0]}]: {error}") from error
            of_pieces[result.rows] = result.outputs["logits"]
        first = 0
        for place, split in zip(window, splits, strict=True):
            last = first + len(split.pieces)
            logits[place] = pooled_logits(split, list(of_pieces[first:last]), SplitPooling(options.split_pooling))
            first = last
        on_done(len(window))
    return logits


def check_query(query: str, tokenizer: TextTokenizer, options: PairOptions) -> None:
    """Refuse a query that leaves no room for the pieces of documents.

    Raises:
        InputError: the query has as many tokens as a piece, or more, or is not a string.
    """
    if options.overflow != Overflow.SPLIT:
        return
    (encoded,) = tokenizer.encode([query], [""], overflow=Overflow.SPLIT, prompt=options.prompt)
    if len(encoded) >= tokenizer.max_len:
        raise InputError(
            f"The query has {len(encoded)} tokens, special tokens, prompt and chat template included where there are "
            f"any; every piece of a document has the whole query and at most {tokenizer.max_len} tokens, so that 1 to "
            f"{tokenizer.max_len - 1} fit.\n"
            "Shorten the query, or cut both texts: overflow='truncate'"
        )


def ranked(
    scores: FloatArray, documents: Sequence[str], *, top_k: int | None, return_documents: bool
) -> list[dict[str, int | float | str]]:
    """Documents by descending scores, as sentence-transformers' CrossEncoder lists them.

    Args:
        scores: float32 [documents].
        documents: the texts.
        top_k: most documents that are listed; None for all.
        return_documents: whether each has its ``text``.

    Returns:
        for each document ``corpus_id``, its place in ``documents``, ``score``, and ``text`` if asked for. Documents of
        one score are in their order.

    Raises:
        InputError: ``top_k`` is negative.
    """
    if top_k is not None and top_k < 0:
        raise InputError(f"top_k is {top_k}; it must be 0 or more, or None for all documents.")
    found: list[dict[str, int | float | str]] = []
    for place in np.argsort(-scores, kind="stable")[:top_k].tolist():
        found.append({"corpus_id": place, "score": float(scores[place])})
        if return_documents:
            found[-1]["text"] = documents[place]
    return found


def _windows(pairs: Sequence[Pair]) -> Iterator[range]:
    """Places of pairs that are tokenised together."""
    first = characters = 0
    for place, (one, other) in enumerate(pairs):
        size = len(one) + len(other)
        if place > first and (place - first == _WINDOW_PAIRS or characters + size > _WINDOW_CHARACTERS):
            yield range(first, place)
            first, characters = place, 0
        characters += size
    if first < len(pairs):
        yield range(first, len(pairs))


def _encoded(
    pairs: Sequence[Pair], window: Sequence[int], tokenizer: TextTokenizer, options: PairOptions, name: str
) -> list[SplitEncoding]:
    """The pieces of each pair of a window; an error names the pair by its place among all."""
    try:
        return _splits([pairs[place] for place in window], tokenizer, options)
    except InputError:
        for place in window:
            try:
                _splits([pairs[place]], tokenizer, options)
            except InputError as error:
                raise InputError(f"{name}[{place}]: {error}") from None
        raise


def _splits(pairs: Sequence[Pair], tokenizer: TextTokenizer, options: PairOptions) -> list[SplitEncoding]:
    firsts, seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    encodings = tokenizer.encode(firsts, seconds, overflow=options.overflow, prompt=options.prompt)
    if options.overflow != Overflow.SPLIT:
        return [in_one_piece(encoding) for encoding in encodings]
    return split_encodings(encodings, max_len=tokenizer.max_len, stride=options.stride, is_pair=True)
