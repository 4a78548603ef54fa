"""Answers to questions, each from its context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.tasks.task import Outputs, Pairs, TaskOptions, Text, TextTask, Values
from hdruntime.text.answers import Answer, AnswerOptions, best_answers
from hdruntime.text.splitting import ChunkPooling, SplitEncoding

if TYPE_CHECKING:
    import pyarrow as pa


class QuestionAnswers(TextTask):
    """The best answers to a question, best first; of a job one, in columns, or a list of several."""

    name = Task.QUESTION_ANSWERING
    job_options = ("answers",)
    needs_text = True
    pairs = Pairs.REQUIRED
    columns = ("question", "context")

    def __init__(self, manifest: Manifest, options: AnswerOptions) -> None:
        super().__init__(manifest)
        self._options = options

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> QuestionAnswers:
        return cls(bundle.manifest, options.answers or AnswerOptions())

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        columns = {"answer": pa.string(), "start": pa.int32(), "end": pa.int32(), "score": pa.float32()}
        if self._options.top_k > 1:
            columns = {"answers": pa.list_(pa.struct(columns))}
        return tuple(pa.schema(columns))

    def values(self, answer: list[Answer]) -> Values:
        answers = [dict(vars(each)) for each in answer]
        return answers[0] if self._options.top_k == 1 else {"answers": answers}

    def answer(self, split: SplitEncoding, parts: Sequence[Outputs], text: Text, pooling: ChunkPooling) -> list[Answer]:
        assert text.text_pair is not None, "a question has a context"
        return best_answers(split, parts, context=text.text_pair, options=self._options)


TASK = QuestionAnswers
