"""``POST /rerank``: the API of Cohere, Jina, Voyage and vLLM, and that of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.errors import InputError
from hdruntime.serve.interface import Answers, Interface, Route, ServeRequest
from hdruntime.serve.request_body import RequestBody
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.text.encoding import Overflow
from hdruntime.text.logits import Activation, activated

_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


class RerankBody(RequestBody, kw_only=True):
    """``POST /rerank``: `documents` of Cohere, Jina and Voyage, or `texts` of text-embeddings-inference."""

    overflow_by_default: ClassVar[Overflow] = Overflow.TRUNCATE

    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: int | None = None
    return_documents: bool = False
    raw_scores: bool = False
    use_activation: bool | None = None
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None

    def candidates(self) -> list[str]:
        """The documents; a body without documents, or with both lists, is rejected."""
        if self.texts is not None and self.documents is not None:
            raise InputError("texts and documents are both there.", hint="Send the list as one of them.")
        documents = [_text_of(item) for item in (self.texts if self.documents is None else self.documents) or ()]
        if not documents:
            raise InputError("There are no documents.", hint="Give a list of them: documents (or texts).")
        return documents


class RerankInterface(Interface):
    """Documents in the order of their scores with a query."""

    @classmethod
    def answers_task(cls, task: TextTask) -> bool:
        return isinstance(task, TextClassification) and len(task.labels) == 1

    def routes(self) -> Sequence[Route]:
        return [Route(path, RerankBody, self._rerank) for path in _PATHS] if self.answers_task(self.model.task) else []

    async def _rerank(self, request: ServeRequest, body: RerankBody) -> object:
        documents = body.candidates()
        if body.top_n is not None and body.top_n < 1:
            raise InputError(parameter="top_n", value=body.top_n, accepted="1 or more")
        pairs = [Text(text=body.query, text_pair=document) for document in documents]
        # 0 stands for no maximum, too.
        max_tokens_each = (body.max_tokens_per_query or None, body.max_tokens_per_doc or None)
        answers = await request.answers(body, pairs, max_tokens_each=max_tokens_each)
        task = self.model.task
        assert isinstance(task, TextClassification), "the route is there for scores alone"
        if body.raw_scores and body.use_activation:
            raise InputError("raw_scores and use_activation contradict each other.", hint="Give one of them.")
        use_activation = False if body.raw_scores else body.use_activation
        scores = scores_of(task, answers, use_activation=use_activation)[:, 0]
        order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        if body.documents is None:
            texts = {index: {"text": documents[index]} if body.return_documents else {} for index in order}
            return [
                {"index": index, "score": float(scores[index]), **texts[index], **answers.truncation(index)}
                for index in order
            ]
        results = [
            {"index": index, "relevance_score": float(scores[index])}
            | ({"document": _object_of(body.documents[index])} if body.return_documents else {})
            | answers.truncation(index)
            for index in order
        ]
        response = {"id": "", "model": self.model.name, "usage": answers.usage, "meta": {}}
        if body.truncation is not None:
            # Voyage's client always sends this key, and reads the results under "data".
            return response | {"object": "list", "data": results}
        return response | {"results": results}


INTERFACE = RerankInterface


def scores_of(task: TextClassification, answers: Answers, *, use_activation: bool | None) -> FloatArray:
    """The scores of the answers, float32 [texts, labels].

    Args:
        task: task whose answers are logits.
        answers: the answers to the texts.
        use_activation: vLLM's key: the checkpoint's activation, or none; None for `served_activation`.
    """
    activation = task.activation if use_activation else served_activation(task, raw_scores=use_activation is False)
    logits = np.array(answers.answers, np.float32).reshape(len(answers.answers), len(task.labels))
    return activated(logits, activation)


def served_activation(task: TextClassification, *, raw_scores: bool, function: str | None = None) -> Activation:
    """The activation of a request's scores.

    One score is the sigmoid of its logit, whatever the checkpoint's activation: clients expect 0 to 1.
    """
    if raw_scores or function == "none":
        return Activation.IDENTITY
    if function is not None:
        return Activation(function)
    return Activation.SIGMOID if len(task.labels) == 1 else task.activation


def _object_of(document: str | dict[str, Any]) -> dict[str, Any]:
    """A document as the response has it: an object as it was sent."""
    return {"text": document} if isinstance(document, str) else document


def _text_of(value: str | dict[str, Any]) -> str:
    text = value if isinstance(value, str) else value.get("text")
    if not isinstance(text, str):
        raise InputError('A document is a text, or an object with one: {"text": "..."}.', hint="Send one of these.")
    return text
