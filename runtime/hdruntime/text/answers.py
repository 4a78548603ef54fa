"""Answers to a question: the most probable spans of its context, over all chunks of the context.

Rajpurkar, Jia and Liang, "Know What You Don't Know: Unanswerable Questions for SQuAD", arXiv 1806.03822, for questions
without an answer, and transformers' question-answering pipeline for the score. In each chunk, the probabilities of the
first and the last token are a softmax over the context's tokens and the special token before the question ([CLS]).
Differences from the pipeline: a span in two chunks has the maximum of its scores instead of their sum, and a
span is not extended to whole words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hdruntime.arrays import FloatArray, WideArray
from hdruntime.errors import InputError, Setting
from hdruntime.text.encoding import Encoding
from hdruntime.text.logits import shortest
from hdruntime.text.splitting import SplitEncoding

MAX_ANSWER_TOKENS = 30
"""Default of the maximum tokens of an answer; a longer span is often the start of one answer and the end of another."""

_SPARE_SPANS = 10
"""Candidates of a chunk beyond twice `top_k`, because tokens that are parts of one character have equal offsets."""


@dataclass(frozen=True)
class Answer:
    """An answer: characters ``start`` to ``end`` (exclusive) of the context; empty if the context has none."""

    answer: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Which answers are given.

    Attributes:
        top_k: at most so many.
        handle_impossible_answer: "The context has no answer" is an answer as well: the empty one. Its score is the
            least of all chunks, in each the probability of [CLS] as the first token times that as the last.
        max_answer_tokens: the longest answer.
    """

    top_k: int = 1
    handle_impossible_answer: bool = False
    max_answer_tokens: int = MAX_ANSWER_TOKENS

    def check(self) -> None:
        """Reject numbers less than 1."""
        for name in ("top_k", "max_answer_tokens"):
            if (number := getattr(self, name)) < 1:
                raise InputError(parameter=name, value=number, accepted="1 or more")


class _Span(NamedTuple):
    """A candidate, in the order of preference: of equal scores the shortest, then the earliest."""

    minus_log_score: float
    tokens: int
    start: int
    end: int


def best_answers(
    split: SplitEncoding, outputs: Sequence[Mapping[str, FloatArray]], *, context: str, options: AnswerOptions
) -> list[Answer]:
    """The answers with the highest scores, best first: 1 to `top_k`.

    An answer ends no earlier than it starts, and is within one chunk: give chunks a stride of `max_answer_tokens`, and
    no answer is cut. Without tokens in the context the answer is empty, with score 0, or 1 if impossible answers are
    handled. A question without a token is rejected, and one without a token before it whose score would say that there
    is no answer.

    Args:
        split: question and context.
        outputs: [chunks], each with ``start_logits`` and ``end_logits``, float32 [tokens of the chunk].
        context: the second text of the pair.
        options: how many answers, and which.
    """
    if 0 not in split.whole.sequence_ids:
        raise InputError("The question has no tokens.")
    has_null = split.whole.sequence_ids[0] is None
    if options.handle_impossible_answer and not has_null:
        raise InputError(
            "The tokenizer adds no special token before the question, so there is no score for an impossible answer.",
            hint=("Leave out ", Setting("handle_impossible_answer"), "."),
        )
    spans: dict[tuple[int, int], _Span] = {}
    null_score = 0.0
    for chunk, values in zip(split.chunks, outputs, strict=True):
        # Not by token types: RoBERTa models have none.
        inside = [token for token, text in enumerate(chunk.sequence_ids) if text == 1]
        shared = [0] * has_null + inside
        starts, ends = (_log_softmax(values[name][shared]) for name in ("start_logits", "end_logits"))
        if has_null:
            null_score = min(null_score, float(starts[0] + ends[0]))
        for span in _best_spans(starts[has_null:], ends[has_null:], chunk, inside, options):
            offsets = span.start, span.end
            spans[offsets] = min(span, spans.get(offsets, span))
    best = [
        Answer(context[span.start : span.end], span.start, span.end, _score(-span.minus_log_score))
        for span in sorted(spans.values())[: options.top_k]
    ]
    if options.handle_impossible_answer:
        best.append(Answer("", 0, 0, _score(null_score)))
        best = sorted(best, key=lambda answer: -answer.score)[: options.top_k]
    return best or [Answer("", 0, 0, 0.0)]


def _log_softmax(logits: FloatArray) -> WideArray:
    """Log-probabilities, float64 [candidates]."""
    if not len(logits):
        return np.zeros(0)
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


def _best_spans(
    starts: WideArray, ends: WideArray, chunk: Encoding, inside: Sequence[int], options: AnswerOptions
) -> Iterator[_Span]:
    """The spans with the best scores among a chunk's tokens of the context (`inside`): enough for all answers asked
    for."""
    tokens = len(inside)
    longest = min(options.max_answer_tokens, tokens)
    if not tokens:
        return
    # [tokens of the span - 1, its first token]; spans that would end after the chunk have no chance.
    sums = np.full((longest, tokens), -np.inf)
    for extra in range(longest):
        sums[extra, : tokens - extra] = starts[: tokens - extra] + ends[extra:]
    if options.top_k == 1:
        order = [int(np.argmax(sums))]
    else:
        order = np.argsort(-sums, axis=None, kind="stable")[: 2 * options.top_k + _SPARE_SPANS].tolist()
    for extra, first in (divmod(position, tokens) for position in order):
        if np.isfinite(sums[extra, first]):
            start, end = chunk.offsets[inside[first]][0], chunk.offsets[inside[first + extra]][1]
            yield _Span(-float(sums[extra, first]), extra + 1, start, end)


def _score(log_score: float) -> float:
    return shortest(np.float32(np.exp(log_score)))
