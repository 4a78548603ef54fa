"""The API of text-embeddings-inference: embeddings, classes, tokens, the model's facts, and ``POST /``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from hdruntime.backends.precision import Precision
from hdruntime.errors import InputError, Setting
from hdruntime.serve.interface import Interface, Route, ServedModel, ServeRequest
from hdruntime.serve.interfaces.pipelines import shown_answer
from hdruntime.serve.interfaces.rerank import RerankInterface, served_activation
from hdruntime.serve.queue import TOKENIZER_THREADS
from hdruntime.serve.request_body import PromptedBody, RequestBody
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.sparse_similarity import SparseVectors
from hdruntime.tasks.task import Pairs, Text
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.text.embeddings import normalized
from hdruntime.text.encoding import Overflow
from hdruntime.text.logits import activated, labels_of, shortest
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import TextTokenizer


class TextsBody(PromptedBody, kw_only=True):
    """``POST /embed_sparse``."""

    inputs: str | list[str]

    def texts(self) -> list[Text]:
        """The inputs as texts of a task."""
        return [Text(text=text) for text in ([self.inputs] if isinstance(self.inputs, str) else self.inputs)]


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


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /decode``: the ids of a text, or lists of them."""

    ids: list[int | list[int]]
    skip_special_tokens: bool = True


class TeiInterface(Interface):
    """The routes that clients of text-embeddings-inference expect."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        task = model.task
        self._routes: list[Route] = []
        if isinstance(task, Embedding):
            self._routes.append(Route("/embed", EmbedBody, self._embed))
        elif isinstance(task, SparseVectors):
            self._routes.append(Route("/embed_sparse", TextsBody, self._embed_sparse))
        elif isinstance(task, TextClassification):
            self._routes.append(Route("/predict", PredictBody, self._predict))
        # ``POST /``, which clients use whatever the model's task is.
        self._roots = [*RerankInterface(model).routes()[:1], *self._routes]
        root = next(iter(self._roots), None)
        self._root_body = None if root is None else root.body
        self._root_path = None if root is None else root.path
        if root is not None:
            self._routes.insert(0, root._replace(path="/"))

    def roots(self) -> Sequence[Route]:
        return self._roots

    def routes(self) -> Sequence[Route]:
        return [
            *self._routes,
            Route("/tokenize", TokenizeBody, self._tokenize),
            Route("/decode", DecodeBody, self._decode),
            Route("/info", None, self._info),
        ]

    async def _embed(self, request: ServeRequest, body: EmbedBody) -> object:
        task = self.model.task
        assert isinstance(task, Embedding), "the route is there for embeddings alone"
        answers = await request.answers(body, body.texts(), prompt_name=body.chosen_prompt_name(task.manifest))
        vectors = task.truncated(np.array(answers.answers), body.dimensions)
        return (normalized(vectors) if body.normalize else vectors).tolist()

    async def _embed_sparse(self, request: ServeRequest, body: TextsBody) -> object:
        texts, prompt_name = body.texts(), body.chosen_prompt_name(self.model.session.manifest)
        answers = await request.answers(body, texts, prompt_name=prompt_name)
        return [
            shown_answer(self.model.task, text, answer) for text, answer in zip(texts, answers.answers, strict=True)
        ]

    async def _predict(self, request: ServeRequest, body: PredictBody) -> object:
        task = self.model.task
        assert isinstance(task, TextClassification), "the route is there for classes alone"
        texts = _texts_or_pairs(body.inputs)
        if task.pairs is Pairs.REQUIRED and any(text.text_pair is None for text in texts):
            raise InputError("The model compares two texts.", hint='Give pairs of them: {"inputs": [["...", "..."]]}.')
        parameters = body.parameters or PredictParameters()
        if parameters.top_k is not None and parameters.top_k < 1:
            raise InputError(parameter="top_k", value=parameters.top_k, accepted="1 or more")
        activation = served_activation(task, raw_scores=body.raw_scores, function=parameters.function_to_apply)
        classes = []
        for logits in (await request.answers(body, texts)).answers:
            scores = map(shortest, activated(logits, activation))
            labels = sorted(zip(task.labels, scores, strict=True), key=lambda pair: -pair[1])[: parameters.top_k]
            classes.append([{"label": label, "score": score} for label, score in labels])
        return classes[0] if isinstance(body.inputs, str) and body.parameters is None else classes

    async def _info(self, request: ServeRequest, body: None) -> object:
        from hdruntime import __version__

        session = self.model.session
        manifest, precision = session.manifest, session.precision
        return {
            "model_id": manifest.name,
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
        pooling = "splade" if path == "/embed_sparse" else pooling
        return {"embedding": {"pooling": pooling}}

    async def _tokenize(self, request: ServeRequest, body: TokenizeBody) -> object:
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        request.check_number(len(texts))
        self._check_size(sum(map(len, texts)), "characters", self.model.options.max_text_characters)
        prompts = prompts_of(self.model.session.manifest) if self.model.task.prompts else ({}, None)
        prompt = chosen_prompt(*prompts, name=body.prompt_name, prompt=None)
        prompted = [prompt + text for text in texts]
        return await asyncio.to_thread(_tokens, request.tokenizer, prompted, body.add_special_tokens)

    async def _decode(self, request: ServeRequest, body: DecodeBody) -> object:
        texts_ids: Sequence[Any] = body.ids if any(isinstance(each, list) for each in body.ids) else [body.ids]
        request.check_number(len(texts_ids))
        # An id counts as four characters, as of a text to embed.
        ids = sum(len(each) for each in texts_ids if isinstance(each, list))
        self._check_size(ids, "ids", max(1, self.model.options.max_text_characters // 4))
        return await asyncio.to_thread(_texts, request.tokenizer, texts_ids, body.skip_special_tokens)

    @staticmethod
    def _check_size(size: int, what: str, limit: int) -> None:
        """Limit the response, which takes some hundred bytes per token."""
        if size > limit:
            larger = Setting("max_text_characters", command="serve")
            raise InputError(
                f"The request has {size} {what}; at most {limit} are answered at once.",
                hint=("Send several requests, or start the server with a larger ", larger, "."),
            )


INTERFACE = TeiInterface


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


def _is_text_or_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) in (1, 2) and all(isinstance(text, str) for text in item)


def _tokens(tokenizer: TextTokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[dict[str, Any]]]:
    encodings = tokenizer.whole_encodings(texts, add_special_tokens=add_special_tokens)
    return [_tokens_of(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]


def _tokens_of(text: str, encoding: Any) -> list[dict[str, Any]]:
    """The tokens of a text; special tokens that the text does not have are at no place in it."""
    columns = zip(encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True)
    return [
        {
            "id": number,
            "text": token if special else text[start:stop],
            "special": bool(special),
            "start": None if special else start,
            "stop": None if special else stop,
        }
        for number, token, (start, stop), special in columns
    ]


def _texts(tokenizer: TextTokenizer, texts_ids: Sequence[Any], skip_special_tokens: bool) -> list[str]:
    size = tokenizer.whole.get_vocab_size()
    for number, ids in enumerate(texts_ids):
        if not isinstance(ids, list):
            raise InputError("ids is neither a list of ids nor a list of lists of ids.")
        for token_id in ids:
            if not 0 <= token_id < size or tokenizer.whole.id_to_token(token_id) is None:
                raise InputError(
                    f"ids[{number}]: {token_id} is no id of the bundle's tokenizer; ids are 0 to {size - 1}."
                )
    return [tokenizer.whole.decode(ids, skip_special_tokens=skip_special_tokens) for ids in texts_ids]
