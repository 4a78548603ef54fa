"""vLLM's API of models without generation: ``POST /score``, ``/classify`` and ``/pooling``.

`openai`, `rerank` and `tokens` have its other routes. infinity has a route ``/classify``, too: its client always sends
the key ``raw_scores``, which vLLM does not have.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hdruntime.arrays import AnyArray
from hdruntime.errors import InputError
from hdruntime.serve.embedding_types import (
    BASE64_VALUE_BYTES,
    FLOAT_VALUE_BYTES,
    base64_of,
    json_rows,
    made_beside_the_loop,
)
from hdruntime.serve.interface import Answers, Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.interfaces.openai import texts_of_input
from hdruntime.serve.interfaces.rerank import RerankInterface, scores_of, served_activation
from hdruntime.serve.interfaces.tei import StatesOfTokens, best_classes
from hdruntime.serve.request_body import RequestBody
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.task import Pairs, Text
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.text.embeddings import normalized
from hdruntime.text.similarity import similarities_of_pairs

_SCORED = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""vLLM's names of the two sides of ``/score``."""


class ScoreBody(RequestBody, kw_only=True):
    """``POST /score``: two sides, each a text or several; one text is compared with all of the other side."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    use_activation: bool | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts; anything but one text and several, or two sides of equal length, is rejected."""
        keys = {name for names in _SCORED for name in names if getattr(self, name) is not None}
        names = next((pair for pair in _SCORED if set(pair) == keys), None)
        if names is None:
            options = ", ".join(" and ".join(pair) for pair in _SCORED)
            raise InputError("The request does not have the two sides of a score.", hint=f"Send one of: {options}.")
        first, second = ([side] if isinstance(side, str) else side for side in (getattr(self, name) for name in names))
        if not second or len(first) not in (1, len(second)):
            raise InputError(
                f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}.",
                hint="Send one text first and one or more to compare it with, or as many first as second ones.",
            )
        return list(zip(first * (len(second) // len(first)), second, strict=True))


class ClassifyBody(RequestBody, kw_only=True):
    """``POST /classify``: of infinity with `raw_scores`, of vLLM without it."""

    input: Any
    use_activation: bool | None = None
    raw_scores: bool | None = None


class PoolingBody(RequestBody, kw_only=True):
    """``POST /pooling``: what the bundle's task gives, or the vectors of tokens."""

    input: Any
    task: Literal["embed", "classify", "token_embed"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    use_activation: bool | None = None


class VllmInterface(Interface):
    """The routes of vLLM that no other interface has."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self._states = StatesOfTokens(model)

    def routes(self) -> Sequence[Route]:
        task = self.model.task
        if not isinstance(task, Embedding | TextClassification):
            return []
        routes = [Route("/pooling", PoolingBody, self._pooling)]
        if isinstance(task, TextClassification):
            # infinity's client sends embeddings to /v1/embeddings and classes to /v1/classify, if its address has /v1.
            routes.extend(Route(path, ClassifyBody, self._classify) for path in ("/classify", "/v1/classify"))
        if isinstance(task, Embedding) or RerankInterface.answers_task(task):
            routes.extend(Route(path, ScoreBody, self._score) for path in ("/score", "/v1/score"))
        return routes

    async def _score(self, request: ServeRequest, body: ScoreBody) -> object:
        task, pairs = self.model.task, body.pairs()
        if isinstance(task, TextClassification):
            answers = await request.answers(body, [Text(text=first, text_pair=second) for first, second in pairs])
            scores = scores_of(task, answers, use_activation=body.use_activation)[:, 0]
            truncations = [answers.truncation(index) for index in range(len(pairs))]
        else:
            if body.use_activation is not None:
                raise InputError("use_activation is of classifiers' scores.", hint="Leave it out: scores are cosines.")
            # Each text runs once.
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            answers = await request.answers(body, [Text(text=text) for text in texts])
            vectors, numbers = np.array(answers.answers), {text: number for number, text in enumerate(texts)}
            sides = [[numbers[pair[side]] for pair in pairs] for side in (0, 1)]
            scores = similarities_of_pairs("cosine", *(vectors[side] for side in sides))
            truncations = [answers.truncation(b) or answers.truncation(a) for a, b in zip(*sides, strict=True)]
            # The header names pairs, too.
            request.truncated.clear()
            request.truncated.update(index for index, each in enumerate(truncations) if each)
        data = [
            {"index": index, "object": "score", "score": score} | truncations[index]
            for index, score in enumerate(scores.tolist())
        ]
        return self._response("score", data, answers)

    async def _classify(self, request: ServeRequest, body: ClassifyBody) -> object:
        task, texts = self.model.task, await texts_of_input(request, body.input)
        assert isinstance(task, TextClassification), "the route is there for classes alone"
        if body.raw_scores is not None and body.use_activation is not None:
            raise InputError(
                "raw_scores and use_activation are both there.",
                hint="Give raw_scores for infinity's answer, or use_activation for vLLM's.",
            )
        answers = await self._classes(request, body, texts)
        if body.raw_scores is not None:
            activation = served_activation(task, raw_scores=body.raw_scores)
            best = [best_classes(task, logits, activation) for logits in answers.answers]
            return self._response("infinity", best, answers) | {"object": "classify"}
        data = [
            {
                "index": index,
                "label": task.labels[int(np.argmax(scores))],
                "probs": scores.tolist(),
                "num_classes": len(scores),
            }
            | answers.truncation(index)
            for index, scores in enumerate(scores_of(task, answers, use_activation=body.use_activation))
        ]
        return self._response("classify", data, answers)

    async def _pooling(self, request: ServeRequest, body: PoolingBody) -> object:
        task, texts = self.model.task, await texts_of_input(request, body.input)
        own = "embed" if isinstance(task, Embedding) else "classify"
        accepted = (own, "token_embed") if own == "embed" else (own,)
        if (body.task or own) not in accepted:
            raise InputError(parameter="task", value=body.task, accepted=f"one of {', '.join(map(repr, accepted))}")
        rows: Sequence[AnyArray]
        is_base64 = body.encoding_format == "base64"
        if isinstance(task, TextClassification):
            answers = await self._classes(request, body, texts)
            rows = list(scores_of(task, answers, use_activation=body.use_activation))
        else:
            if body.task == "token_embed":
                value_bytes = BASE64_VALUE_BYTES if is_base64 else FLOAT_VALUE_BYTES
                answers = await self._states.answers(request, body, texts, value_bytes=value_bytes)
            else:
                answers = await request.answers(body, texts)
            rows = [normalized(each) if body.use_activation else each for each in answers.answers]
        encode = base64_of if is_base64 else _json_of
        encoded = await made_beside_the_loop(lambda: list(map(encode, rows)), rows)
        data = [
            {"index": index, "object": "pooling", "data": each} | answers.truncation(index)
            for index, each in enumerate(encoded)
        ]
        return self._response("pool", data, answers)

    async def _classes(self, request: ServeRequest, body: RequestBody, texts: Sequence[Text]) -> Answers:
        if self.model.task.pairs is Pairs.REQUIRED:
            raise InputError("The model compares two texts.", hint="Send them to /score.")
        return await request.answers(body, texts)

    def _response(self, kind: str, data: Sequence[object], answers: Answers) -> dict[str, object]:
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self.model.name,
            "data": data,
            "usage": answers.usage,
        }


INTERFACE = VllmInterface


def _json_of(row: AnyArray) -> Any:
    """The values of a text, or of each of its tokens, for a response."""
    return json_rows(row) if row.ndim > 1 else row.tolist()
