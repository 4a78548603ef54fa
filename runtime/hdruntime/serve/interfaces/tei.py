"""The API of text-embeddings-inference: embeddings, classes, the model's facts, and ``POST /``.

`rerank` and `tokens` have its other routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from hdruntime.backends.precision import Precision
from hdruntime.errors import InputError
from hdruntime.serve.embedding_types import FLOAT_VALUE_BYTES, json_rows, made_beside_the_loop
from hdruntime.serve.interface import Answers, Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.interfaces.openai import texts_of_input
from hdruntime.serve.interfaces.pipelines import arrays_of, json_sparse
from hdruntime.serve.interfaces.rerank import RerankInterface, served_activation
from hdruntime.serve.queue import TOKENIZER_THREADS
from hdruntime.serve.request_body import PromptedBody, RequestBody
from hdruntime.tasks.embedding import Embedding, TokenStates
from hdruntime.tasks.hybrid_similarity import HybridDense, HybridSparse
from hdruntime.tasks.sparse_similarity import SparseVectors
from hdruntime.tasks.task import Pairs, Text
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.text.embeddings import normalized
from hdruntime.text.encoding import Overflow
from hdruntime.text.logits import Activation, activated, labels_of, shortest
from hdruntime.text.pooling import PoolingMode
from hdruntime.text.similarity import similarities


class TextsBody(PromptedBody, kw_only=True):
    """``POST /embed_sparse``: a text, texts, the ids of a text with its special tokens, or lists of ids."""

    inputs: str | list[str | int | list[int]]

    async def texts(self, request: ServeRequest) -> list[Text]:
        """The inputs as texts of a task."""
        return await texts_of_input(request, self.inputs)


class EmbedAllBody(TextsBody, kw_only=True):
    """``POST /embed_all``."""

    normalize: bool = False


class EmbedBody(TextsBody, kw_only=True):
    """``POST /embed``."""

    normalize: bool = True
    dimensions: int | None = None


class PredictParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of Hugging Face's Inference API for text classification."""

    top_k: int | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None


class PredictBody(RequestBody, kw_only=True):
    """``POST /predict``: a text, or a list of texts and pairs; `parameters` ask for the answer of Hugging Face's
    Inference API, a list of classes for each text even if there is one text."""

    inputs: Any
    raw_scores: bool = False
    parameters: PredictParameters | None = None


class SimilarityInputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, and the texts that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(PromptedBody, kw_only=True):
    """`parameters` of ``POST /similarity``."""

    dimensions: int | None = None


class SimilarityBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /similarity``."""

    inputs: SimilarityInputs
    parameters: dict[str, Any] = {}


class StatesOfTokens:
    """The vectors of all tokens of a request's texts, for bundles with one vector per text.

    Args:
        model: the served bundle.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._task: TokenStates | None = None

    async def answers(
        self,
        request: ServeRequest,
        body: RequestBody,
        texts: Sequence[Text],
        *,
        prompt_name: str | None = None,
        value_bytes: float = FLOAT_VALUE_BYTES,
    ) -> Answers:
        """The vectors of each text's tokens, special tokens and prompt included: float32 [tokens, hidden_size].

        Texts that may have too many tokens for one response, in which a value has `value_bytes`, are rejected before
        they run.
        """
        manifest = self._model.session.manifest
        self._model.check_size_of_tokens(request, body, texts, manifest.hidden_size, value_bytes)
        self._task = self._task or TokenStates(manifest)
        return await request.answers(body, texts, task=self._task, prompt_name=prompt_name)


class TeiInterface(Interface):
    """The routes that clients of text-embeddings-inference expect."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        task = model.task
        self._states = StatesOfTokens(model)
        self._routes: list[Route] = []
        if isinstance(task, Embedding):
            self._routes.append(Route("/embed", EmbedBody, self._embed, error=tei_error))
            self._routes.append(Route("/similarity", SimilarityBody, self._similarity, error=tei_error))
            self._routes.append(Route("/embed_all", EmbedAllBody, self._embed_all, error=tei_error))
        self._sparse = HybridSparse(task.manifest) if isinstance(task, HybridDense) else task
        if isinstance(self._sparse, SparseVectors | HybridSparse):
            self._routes.append(Route("/embed_sparse", TextsBody, self._embed_sparse, error=tei_error))
        if isinstance(task, TextClassification):
            self._routes.append(Route("/predict", PredictBody, self._predict, error=tei_error))
        # ``POST /``, which clients use whatever the model's task is.
        self._roots = [*RerankInterface(model).routes()[:1], *self._routes[: 2 if isinstance(task, Embedding) else 1]]
        root = next(iter(self._roots), None)
        self._root_body = None if root is None else root.body
        self._root_path = None if root is None else root.path
        if root is not None:
            handled = Route("/", dict, self._embed_or_compare) if root.body is EmbedBody else root
            self._routes.insert(0, handled._replace(path="/", error=tei_error))

    def roots(self) -> Sequence[Route]:
        return self._roots

    def routes(self) -> Sequence[Route]:
        # Of the kinds of models that `/info` tells apart.
        info = [Route("/info", None, self._info, error=tei_error)] if self._roots else []
        return [*self._routes, *info]

    async def _embed(self, request: ServeRequest, body: EmbedBody) -> object:
        task = self.model.task
        assert isinstance(task, Embedding), "the route is there for embeddings alone"
        answers = await request.answers(
            body, await body.texts(request), prompt_name=body.chosen_prompt_name(task.manifest)
        )
        vectors = task.truncated(np.array(answers.answers), body.dimensions)
        vectors = normalized(vectors) if body.normalize else vectors
        return await made_beside_the_loop(lambda: json_rows(vectors), [vectors])

    async def _similarity(self, request: ServeRequest, body: SimilarityBody) -> object:
        task = self.model.task
        assert isinstance(task, Embedding), "the route is there for embeddings alone"
        parameters = request.body(body.parameters, SimilarityParameters)
        if not body.inputs.sentences:
            raise InputError("inputs.sentences has no text.", hint="Send one or more to compare the source with.")
        texts = [Text(text=text) for text in (body.inputs.source_sentence, *body.inputs.sentences)]
        answers = await request.answers(parameters, texts, prompt_name=parameters.chosen_prompt_name(task.manifest))
        vectors = task.truncated(np.array(answers.answers), parameters.dimensions)
        return similarities("cosine", vectors[0], vectors[1:])[0].tolist()

    async def _embed_or_compare(self, request: ServeRequest, values: dict[str, Any]) -> object:
        """``POST /``: ``/embed``, or, as ``inputs`` is an object, ``/similarity``."""
        if isinstance(values.get("inputs"), dict):
            return await self._similarity(request, request.body(values, SimilarityBody))
        return await self._embed(request, request.body(values, EmbedBody))

    async def _embed_all(self, request: ServeRequest, body: EmbedAllBody) -> object:
        prompt_name = body.chosen_prompt_name(self.model.session.manifest)
        answers = await self._states.answers(request, body, await body.texts(request), prompt_name=prompt_name)
        vectors = [normalized(each) if body.normalize else each for each in answers.answers]
        return await made_beside_the_loop(lambda: [json_rows(each) for each in vectors], vectors)

    async def _embed_sparse(self, request: ServeRequest, body: TextsBody) -> object:
        prompt_name = body.chosen_prompt_name(self.model.session.manifest)
        answers = await request.answers(body, await body.texts(request), task=self._sparse, prompt_name=prompt_name)
        vectors = answers.answers
        return await made_beside_the_loop(lambda: list(map(json_sparse, vectors)), arrays_of(vectors))

    async def _predict(self, request: ServeRequest, body: PredictBody) -> object:
        task = self.model.task
        assert isinstance(task, TextClassification), "the route is there for classes alone"
        texts = _texts_or_pairs(body.inputs)
        if task.pairs is Pairs.REQUIRED and any(text.text_pair is None for text in texts):
            raise InputError("The model compares two texts.", hint='Give pairs of them: {"inputs": [["...", "..."]]}.')
        parameters = body.parameters or PredictParameters()
        if parameters.top_k is not None and parameters.top_k < 1:
            raise InputError(parameter="top_k", value=parameters.top_k, accepted="1 or more")
        if body.raw_scores and parameters.function_to_apply not in (None, "none"):
            raise InputError("raw_scores and function_to_apply contradict each other.", hint="Give one of them.")
        activation = served_activation(task, raw_scores=body.raw_scores, function=parameters.function_to_apply)
        answers = await request.answers(body, texts)
        classes = [best_classes(task, logits, activation)[: parameters.top_k] for logits in answers.answers]
        return classes[0] if isinstance(body.inputs, str) and body.parameters is None else classes

    async def _info(self, request: ServeRequest, body: None) -> object:
        from hdruntime import __version__

        session = self.model.session
        manifest, precision = session.manifest, session.precision
        return {
            "model_id": self.model.name,
            "model_sha": None,
            "model_dtype": manifest.dtype if precision is Precision.AUTO else precision.value,
            "model_type": self._model_type(),
            # As many requests wait as tokens fit: a text has one token or more.
            "max_concurrent_requests": self.model.max_queue_tokens,
            "max_input_length": self.model.tokenizer.max_len,
            "max_batch_tokens": session.batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": self.model.options.max_texts,
            "auto_truncate": self._truncates,
            "tokenization_workers": TOKENIZER_THREADS,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }

    @property
    def _truncates(self) -> bool:
        """Whether texts of too many tokens are truncated at ``/`` where a request does not say it."""
        body = self._root_body
        if self.model.options.truncate is None and body is not None and issubclass(body, RequestBody):
            return body.overflow_by_default is Overflow.TRUNCATE
        return self.model.options.truncate == "end"

    def _model_type(self) -> dict[str, dict[str, object]]:
        path = self._root_path
        if path in ("/rerank", "/predict"):
            labels = labels_of(self.model.session.manifest)
            classes: dict[str, object] = {
                "id2label": {str(number): label for number, label in enumerate(labels)},
                "label2id": {label: number for number, label in enumerate(labels)},
            }
            return {"reranker" if path == "/rerank" else "classifier": classes}
        settings = self.model.session.manifest.sentence
        pooling = ",".join(() if settings is None else settings.pooling) or "mean"
        pooling = "last_token" if pooling == PoolingMode.LAST_TOKEN else pooling
        pooling = "splade" if path == "/embed_sparse" else pooling
        return {"embedding": {"pooling": pooling}}


INTERFACE = TeiInterface

_ERROR_TYPES = {429: "Overloaded", 422: "Backend", 500: "Backend", 503: "Unhealthy"}


def tei_error(status: int, message: str) -> object:
    """The body of an error, as text-embeddings-inference writes it."""
    return {"error": message, "error_type": _ERROR_TYPES.get(status, "Validation")}


def best_classes(task: TextClassification, logits: Any, activation: Activation) -> list[dict[str, object]]:
    """The classes of a text's logits, [labels], the one with the highest score first."""
    scores = map(shortest, activated(logits, activation))
    ordered = sorted(zip(task.labels, scores, strict=True), key=lambda pair: -pair[1])
    return [{"label": label, "score": score} for label, score in ordered]


def _texts_or_pairs(value: object) -> list[Text]:
    """The texts of ``/predict``.

    A list of two texts is two texts, as a list of three is three; a pair is a list in the list.
    text-embeddings-inference reads two texts as a pair, and thus answers a batch of two texts with one answer.
    """
    if isinstance(value, str):
        return [Text(text=value)]
    if isinstance(value, list):
        items = [[item] if isinstance(item, str) else item for item in value]
        if all(
            isinstance(item, list) and len(item) in (1, 2) and all(isinstance(t, str) for t in item) for item in items
        ):
            return [Text(text=item[0], text_pair=item[1] if len(item) > 1 else None) for item in items]
    raise InputError(
        'inputs is neither a text nor a list of texts and pairs of texts: ["...", ["...", "..."]].',
        hint="Send one of these.",
    )
