"""Answers to questions, each from its context, by bundles of question-answering."""

from __future__ import annotations

__all__ = ["answers"]

from collections.abc import Sequence

from hdruntime.inference.text_runner import TextRunner
from hdruntime.tasks.checks import check_task
from hdruntime.text.answers import Answer, AnswerOptions, best_answers
from hdruntime.text.tokenization import Overflow


def answers(
    runner: TextRunner,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    options: AnswerOptions,
    overflow: Overflow | str,
    stride: int,
    batch_tokens: int | None,
) -> list[list[Answer]]:
    """See :meth:`hdruntime.Session.answers`."""
    check_task(runner.manifest, "question-answering", method="answers", overflow=overflow)
    options.check()
    splits = runner.pieces(questions, contexts, overflow=overflow, stride=stride)
    of_pieces = runner.outputs_of_pieces(splits, ["start_logits", "end_logits"], batch_tokens=batch_tokens)
    return [
        best_answers(split, outputs, context=context, options=options)
        for split, outputs, context in zip(splits, of_pieces, contexts, strict=True)
    ]
