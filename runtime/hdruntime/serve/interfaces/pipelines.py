"""``POST /`` for tasks that text-embeddings-inference does not have, answered as pipelines of transformers do.

`inputs` is a text or a list of texts; clients of Hugging Face's Inference API send `parameters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from hdruntime.arrays import AnyArray
from hdruntime.errors import InputError
from hdruntime.serve.embedding_types import FLOAT_VALUE_BYTES, json_rows, made_beside_the_loop
from hdruntime.serve.interface import Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.request_body import RequestBody
from hdruntime.tasks.fill_mask import CHOICES, MaskFillings
from hdruntime.tasks.question_answering import QuestionAnswers
from hdruntime.tasks.sparse_similarity import SparseVector, SparseVectors
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_scoring import TextScores
from hdruntime.tasks.token_classification import Entities
from hdruntime.tasks.token_similarity import Side, TokenVectors
from hdruntime.text.answers import AnswerOptions
from hdruntime.text.entities import OUTSIDE_LABEL, Aggregation


class Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a pipeline that has none."""


class PipelineBody(RequestBody, kw_only=True):
    """A body whose `inputs` are a text or a list of texts."""

    inputs: str | list[str]
    parameters: Parameters | None = None

    def texts(self) -> list[Text]:
        """The inputs as texts of a task."""
        return [Text(text=text) for text in ([self.inputs] if isinstance(self.inputs, str) else self.inputs)]


class TokenVectorsBody(PipelineBody, kw_only=True):
    """Texts for a vector for each token; `prompt_name` says that they are queries."""

    prompt_name: Side = Side.DOCUMENT


class EntitiesParameters(Parameters, kw_only=True, forbid_unknown_fields=True):
    """Parameters of token-classification."""

    aggregation_strategy: Aggregation = Aggregation.NONE
    ignore_labels: tuple[str, ...] = (OUTSIDE_LABEL,)


class EntitiesBody(PipelineBody, kw_only=True):
    """Texts for token-classification."""

    parameters: EntitiesParameters | None = None


class FillMaskParameters(Parameters, kw_only=True, forbid_unknown_fields=True):
    """Parameters of fill-mask."""

    top_k: int = CHOICES


class FillMaskBody(PipelineBody, kw_only=True):
    """Texts for fill-mask."""

    parameters: FillMaskParameters | None = None


class Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A question and the text that has its answer."""

    question: str
    context: str


class QuestionParameters(Parameters, kw_only=True, forbid_unknown_fields=True):
    """Parameters of question-answering."""

    top_k: int = 1
    max_answer_len: int = AnswerOptions.max_answer_tokens
    handle_impossible_answer: bool = False


class QuestionBody(RequestBody, kw_only=True):
    """Questions for question-answering: `inputs`, or the two keys of one."""

    inputs: Question | list[Question | tuple[str, str]] | None = None
    question: str | None = None
    context: str | None = None
    parameters: QuestionParameters | None = None

    def texts(self) -> list[Text]:
        """The inputs as texts of a task."""
        content = self.inputs
        if content is None and self.question is not None and self.context is not None:
            content = Question(question=self.question, context=self.context)
        elif content is None or (self.question, self.context) != (None, None):
            raise InputError(
                "The body has no question with its context, or several.",
                hint='Send {"inputs": {"question": "...", "context": "..."}}, or a list of these as inputs.',
            )
        questions = content if isinstance(content, list) else [content]
        pairs = [(each.question, each.context) if isinstance(each, Question) else each for each in questions]
        return [Text(text=question, text_pair=context) for question, context in pairs]


_BODIES: dict[type[TextTask], type[PipelineBody | QuestionBody]] = {
    Entities: EntitiesBody,
    MaskFillings: FillMaskBody,
    QuestionAnswers: QuestionBody,
    TextScores: PipelineBody,
    TokenVectors: TokenVectorsBody,
}


class PipelinesInterface(Interface):
    """The route of a pipeline."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        # Kept, since texts of one task share batches.
        self._tasks: dict[object, TextTask] = {}

    def routes(self) -> Sequence[Route]:
        body = _BODIES.get(type(self.model.task))
        return [] if body is None else [Route("/", body, self._answer)]

    def roots(self) -> Sequence[Route]:
        return self.routes()

    async def _answer(self, request: ServeRequest, body: Any) -> object:
        task, texts = self._task_of(body), body.texts()
        prompt_name = body.prompt_name if isinstance(body, TokenVectorsBody) else None
        if isinstance(task, TokenVectors):
            self.model.check_size_of_tokens(request, body, texts, task.dimensions, FLOAT_VALUE_BYTES)
        answers = (await request.answers(body, texts, task=task, prompt_name=prompt_name)).answers
        shown = await shown_answers(task or self.model.task, texts, answers)
        if isinstance(body.parameters, EntitiesParameters):
            shown = [_without(each, body.parameters.ignore_labels) for each in shown]
        if isinstance(body.parameters, FillMaskParameters):
            shown = [_best(each, body.parameters.top_k) for each in shown]
        return shown if isinstance(body.inputs, list) else shown[0]

    def _task_of(self, body: Any) -> TextTask | None:
        """The task of a request's parameters; None for the served one."""
        task, parameters = self.model.task, body.parameters
        if isinstance(parameters, EntitiesParameters):
            assert isinstance(task, Entities)
            if OUTSIDE_LABEL not in parameters.ignore_labels:
                raise InputError(
                    f"ignore_labels has no {OUTSIDE_LABEL!r}; tokens of that label are never answered.",
                    hint=f"Add {OUTSIDE_LABEL!r}.",
                )
            return self._tasks.setdefault(
                parameters.aggregation_strategy, task.aggregated(parameters.aggregation_strategy)
            )
        if isinstance(parameters, FillMaskParameters) and not 1 <= parameters.top_k <= CHOICES:
            raise InputError(parameter="top_k", value=parameters.top_k, accepted=f"1 to {CHOICES}")
        if isinstance(parameters, QuestionParameters):
            options = AnswerOptions(
                top_k=parameters.top_k,
                handle_impossible_answer=parameters.handle_impossible_answer,
                max_answer_tokens=parameters.max_answer_len,
            )
            options.check()
            return QuestionAnswers(task.manifest, options)
        if isinstance(body, TokenVectorsBody):
            return self._tasks.setdefault(body.prompt_name, TokenVectors(task.manifest, body.prompt_name))
        return None


INTERFACE = PipelinesInterface


async def shown_answers(task: TextTask, texts: Sequence[Text], answers: Sequence[Any]) -> list[Any]:
    def shown() -> list[Any]:
        return [shown_answer(task, text, answer) for text, answer in zip(texts, answers, strict=True)]

    return await made_beside_the_loop(shown, arrays_of(answers))


def arrays_of(answers: Sequence[Any]) -> list[AnyArray]:
    """The arrays of answers whose JSON may be large."""
    vectors = [each for each in answers if isinstance(each, np.ndarray)]
    sparse = [each for each in answers if isinstance(each, SparseVector)]
    return [*vectors, *(each.indices for each in sparse), *(each.values for each in sparse)]


def shown_answer(task: TextTask, text: Text, answer: Any) -> Any:
    """A task's answer to a text, as a pipeline of transformers gives it where there is one; not of embeddings and
    classes."""
    if isinstance(task, Entities):
        key = "entity" if task.aggregation is Aggregation.NONE else "entity_group"
        return [
            {key: each.label, "score": each.score, "word": each.text, "start": each.start, "end": each.end}
            for each in answer
        ]
    if isinstance(task, MaskFillings):
        masks = [
            [
                {
                    "score": filling.score,
                    "token": filling.token_id,
                    "token_str": filling.token,
                    "sequence": task.filled(text.text, number, filling.token),
                }
                for filling in mask
            ]
            for number, mask in enumerate(answer)
        ]
        return masks[0] if len(masks) == 1 else masks
    if isinstance(task, QuestionAnswers):
        values = task.values(answer)
        return values.get("answers", values)
    if isinstance(task, SparseVectors):
        return json_sparse(answer)
    if isinstance(task, TokenVectors):
        return json_rows(answer)
    return task.values(answer)


def json_sparse(vector: SparseVector) -> msgspec.Raw:
    """The JSON of a sparse vector, as text-embeddings-inference gives it."""
    pairs = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
    return msgspec.Raw(msgspec.json.encode([{"index": index, "value": value} for index, value in pairs]))


def _without(entities: list[dict[str, Any]], labels: Sequence[str]) -> list[dict[str, Any]]:
    return [each for each in entities if each.get("entity", each.get("entity_group")) not in labels]


def _best(fillings: list[Any], most: int) -> list[Any]:
    """The best fillings of the mask, or of each of several."""
    has_several = bool(fillings) and isinstance(fillings[0], list)
    return [each[:most] for each in fillings] if has_several else fillings[:most]
