"""The interface of text-embeddings-inference beside the routes of tasks: the model's facts, tokens, and ``POST /``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from hdruntime.backends.precision import Precision
from hdruntime.errors import InputError
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.queue import TOKENIZER_THREADS
from hdruntime.session import Session
from hdruntime.tasks.requests import Body
from hdruntime.tasks.task import Call, Route, TextTask
from hdruntime.text.logits import labels_of
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import Overflow, TextTokenizer

_ROOTS = ("/embed", "/embed_sparse", "/rerank", "/predict")
"""A model is served at ``/`` as at the first of these routes that its task has: a reranker has the last two."""


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /decode``: the ids of a text, or lists of them."""

    ids: list[int | list[int]]
    skip_special_tokens: bool = True


class TeiInterface:
    """The routes that clients of text-embeddings-inference expect of every model; `most_tokens` are those that the
    queue of texts holds."""

    def __init__(self, task: TextTask, options: ServeOptions, session: Session, *, most_tokens: int) -> None:
        self._task, self._options, self._session, self._most_tokens = task, options, session, most_tokens
        served = {route.path: route for route in task.routes()}
        self._root = next((served[path] for path in _ROOTS if path in served), None)

    def routes(self) -> list[Route]:
        """The routes of POST requests."""
        routes = [Route("/tokenize", TokenizeBody, self._tokenize), Route("/decode", DecodeBody, self._decode)]
        return routes if self._root is None else [self._root._replace(path="/"), *routes]

    def info(self, tokenizer: TextTokenizer) -> dict[str, object]:
        """The answer of ``GET /info``."""
        from hdruntime import __version__

        manifest, precision = self._session.manifest, self._session.precision
        return {
            "model_id": manifest.name,
            "model_sha": None,
            "model_dtype": manifest.dtype if precision is Precision.AUTO else precision.value,
            "model_type": self._model_type(),
            # As many requests wait as tokens fit: a text has one or more.
            "max_concurrent_requests": self._most_tokens,
            "max_input_length": tokenizer.max_len,
            "max_batch_tokens": self._session.batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": self._options.max_texts,
            "auto_truncate": self._truncates,
            "tokenization_workers": TOKENIZER_THREADS,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }

    @property
    def _truncates(self) -> bool:
        """Whether texts of too many tokens are truncated at ``/`` where a request does not say it."""
        body = None if self._root is None else self._root.body
        if self._options.truncate is None and body is not None and issubclass(body, Body):
            return body.overflow_by_default is Overflow.TRUNCATE
        return self._options.truncate == "end"

    def _model_type(self) -> dict[str, dict[str, object]]:
        path = None if self._root is None else self._root.path
        if path in ("/rerank", "/predict"):
            labels = labels_of(self._session.manifest)
            classes: dict[str, object] = {
                "id2label": {str(number): label for number, label in enumerate(labels)},
                "label2id": {label: number for number, label in enumerate(labels)},
            }
            return {"reranker" if path == "/rerank" else "classifier": classes}
        own = self._session.manifest.sentence
        pooling = "splade" if path == "/embed_sparse" else ",".join(own.pooling if own is not None else ()) or "mean"
        return {"embedding": {"pooling": pooling}}

    async def _tokenize(self, call: Call, body: TokenizeBody) -> object:
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        call.check_number(len(texts))
        self._check_size(sum(map(len, texts)), "characters", self._options.max_text_characters)
        prompts = prompts_of(self._session.manifest) if self._task.prompts else ({}, None)
        prompt = chosen_prompt(*prompts, name=body.prompt_name, prompt=None)
        prompted = [prompt + text for text in texts]
        return await asyncio.to_thread(_tokens, call.tokenizer, prompted, body.add_special_tokens)

    async def _decode(self, call: Call, body: DecodeBody) -> object:
        listed: Sequence[Any] = body.ids if any(isinstance(each, list) for each in body.ids) else [body.ids]
        call.check_number(len(listed))
        # An id counts as four characters, as of a text to embed.
        ids = sum(len(each) for each in listed if isinstance(each, list))
        self._check_size(ids, "ids", max(1, self._options.max_text_characters // 4))
        return await asyncio.to_thread(_texts, call.tokenizer, listed, body.skip_special_tokens)

    @staticmethod
    def _check_size(size: int, what: str, most: int) -> None:
        """Limit what a request gets: the answer takes some hundred bytes for each token."""
        if size > most:
            raise InputError(
                f"The request has {size} {what}; at most {most} are answered at once. Send several requests, or start "
                "the server with a larger --max-text-characters."
            )


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


def _texts(tokenizer: TextTokenizer, listed: Sequence[Any], skip_special_tokens: bool) -> list[str]:
    size = tokenizer.whole.get_vocab_size()
    for number, ids in enumerate(listed):
        if not isinstance(ids, list):
            raise InputError("ids is neither a list of ids nor a list of lists of ids.")
        for each in ids:
            if not 0 <= each < size or tokenizer.whole.id_to_token(each) is None:
                raise InputError(f"ids[{number}]: {each} is no id of the bundle's tokenizer; ids are 0 to {size - 1}.")
    return [tokenizer.whole.decode(ids, skip_special_tokens=skip_special_tokens) for ids in listed]
