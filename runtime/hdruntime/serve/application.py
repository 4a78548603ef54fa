"""The routes of a server, an ASGI application."""

from __future__ import annotations

__all__ = ["application"]

import asyncio
import base64
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.optional import require
from hdruntime.serve.answering import OVERFLOWS, scores_of, served_task
from hdruntime.serve.bodies import EmbedBody, EmbeddingsBody, PredictBody, RerankBody, SparseBody
from hdruntime.serve.metrics import Metrics
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.queue import QueueFullError, TextQueue
from hdruntime.session import Session
from hdruntime.tasks.classification import TextClassification
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.late_chunks import ChunkEmbeddings
from hdruntime.tasks.reading import Reading
from hdruntime.tasks.sparse_vectors import SparseVectors
from hdruntime.tasks.task import Pairs, Task, Text
from hdruntime.tasks.text_inference import TextInference, TextItem
from hdruntime.text.chunking import overlap_of
from hdruntime.text.embeddings import normalized, truncated
from hdruntime.text.logits import activated
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import Overflow

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

Body = TypeVar("Body")
Answer = Callable[["Request"], Awaitable["Response"]]

_OPEN = ("/health", "/ready")
"""Routes that need no key."""

_GONE = 499
"""The status of a request whose client is gone, for the metrics; nobody reads the answer."""


class _RequestError(Exception):
    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def application(bundle: Bundle, session: Session, options: ServeOptions) -> Any:
    """The ASGI application; the session stays open when the application ends.

    Args:
        bundle: the bundle of the session.
        session: that runs all texts.
        options: limits.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        InputError: the bundle has no tokenizer, or a task that has no route.
    """
    require("starlette")
    from starlette.applications import Starlette
    from starlette.routing import Route

    server = _Server(bundle, session, options)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            server.close()

    routes = [Route(path, server.answered(path, answer), methods=[method]) for method, path, answer in server.routes()]
    errors: dict[Any, Any] = {404: server.unknown, 405: server.unknown}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=errors)


class _Server:
    def __init__(self, bundle: Bundle, session: Session, options: ServeOptions) -> None:
        self._session, self._options, self._manifest = session, options, bundle.manifest
        self._task = served_task(bundle)
        self._chunks: ChunkEmbeddings | None = None
        self._inferences: dict[tuple[Task, Overflow, str], TextInference] = {}
        self._running: asyncio.Task[None] | None = None
        self.queue = TextQueue(
            batch_tokens=session.batch_tokens,
            most_tokens=options.queue_tokens(),
            max_wait_s=options.max_wait_ms / 1000,
            on_batch=lambda texts, tokens: self.metrics.batch(texts, tokens),
        )
        self.metrics = Metrics(lambda: self.queue.tokens, lambda: session.padding)

    def close(self) -> None:
        """End the queue."""
        if self._running is not None:
            self._running.cancel()
        self.queue.close()

    def routes(self) -> list[tuple[str, str, Answer]]:
        """Method, path and answer of the routes that fit the bundle's task."""
        always: list[tuple[str, str, Answer]] = [
            ("GET", "/health", self._health),
            ("GET", "/ready", self._health),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models),
        ]
        if isinstance(self._task, Embedding):
            return [*always, ("POST", "/v1/embeddings", self._embeddings), ("POST", "/embed", self._embed)]
        if isinstance(self._task, SparseVectors):
            return [*always, ("POST", "/embed_sparse", self._embed_sparse)]
        ranks = [("POST", path, self._rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
        is_reranker = isinstance(self._task, TextClassification) and len(self._task.labels) == 1
        return [*always, ("POST", "/predict", self._predict), *(ranks if is_reranker else [])]

    def answered(self, path: str, answer: Answer) -> Answer:
        """The route's answer, counted, or its error in OpenAI's form."""

        async def checked(request: Request) -> Response:
            began, status = time.monotonic(), _GONE
            try:
                self._check_key(request, path)
                response = await self._unless_gone(request, answer)
                status = response.status_code
                return response
            except _RequestError as error:
                status = error.status
                return self._error(error.status, str(error), retry_after=error.retry_after)
            except QueueFullError as error:
                status = 429
                return self._error(status, str(error), retry_after=1)
            except InputError as error:
                status = 400
                return self._error(status, str(error))
            except asyncio.CancelledError:
                status = 503
                return self._error(status, "The server ends before it has the answer.", retry_after=1)
            except asyncio.TimeoutError:
                status = 503
                return self._error(status, f"No answer within {self._options.timeout_s:g} seconds.", retry_after=1)
            except Exception:
                # The client gets no detail, and the log no text of a client's.
                status = 500
                logger.error("%s failed", path, exc_info=True)
                return self._error(status, "The server failed; its log has the reason.")
            finally:
                self.metrics.requests.labels(path, status).inc()
                self.metrics.seconds.labels(path).observe(time.monotonic() - began)

        return checked

    async def unknown(self, request: Request, error: Any) -> Response:
        """The answer to an unknown path, and to a method that a path has not."""
        paths = ", ".join(f"{method} {path}" for method, path, _ in self.routes())
        return self._error(error.status_code, f"There is no such route for the bundle's task; there are {paths}.")

    async def _health(self, request: Request) -> Response:
        return self._json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        from starlette.responses import Response

        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _models(self, request: Request) -> Response:
        manifest = self._manifest
        model = {"id": manifest.name, "object": "model", "created": 0, "owned_by": "hdexport", "task": manifest.task}
        return self._json({"object": "list", "data": [model | {"max_model_len": manifest.max_len}]})

    async def _embeddings(self, request: Request) -> Response:
        body = await self._body(request, EmbeddingsBody)
        texts = self._texts_or_ids(body.input)
        if body.late_chunking:
            items = await self._late_chunks(request, [text.text for text in texts], body)
            vectors = items[0].answer.vectors
        else:
            overflow = OVERFLOWS[body.truncate]
            items = await self._answers(request, self._task, texts, overflow, prompt_name=body.prompt_name)
            vectors = np.stack([item.answer for item in items])
        vectors = self._shortened(vectors, body.dimensions)
        rows = [vector.tolist() for vector in vectors]
        if body.encoding_format == "base64":
            rows = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        return self._json({"object": "list", "data": data, "model": self._manifest.name, "usage": _usage(items)})

    async def _embed(self, request: Request) -> Response:
        body = await self._body(request, EmbedBody)
        items = await self._embedded(request, body)
        vectors = self._shortened(np.stack([item.answer for item in items]), body.dimensions)
        return self._json([vector.tolist() for vector in (normalized(vectors) if body.normalize else vectors)])

    async def _embed_sparse(self, request: Request) -> Response:
        items = await self._embedded(request, await self._body(request, SparseBody))
        return self._json(
            [
                [
                    {"index": index, "value": value}
                    for index, value in zip(item.answer.indices.tolist(), item.answer.values.tolist(), strict=True)
                ]
                for item in items
            ]
        )

    async def _embedded(self, request: Request, body: SparseBody) -> list[TextItem]:
        inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        texts = [Text(text=text) for text in inputs]
        overflow = OVERFLOWS[body.truncate]
        return await self._answers(request, self._task, texts, overflow, prompt_name=body.prompt_name)

    async def _rerank(self, request: Request) -> Response:
        body = await self._body(request, RerankBody)
        assert isinstance(self._task, TextClassification)
        documents = [_document(each) for each in (body.texts if body.documents is None else body.documents) or ()]
        if not documents:
            raise InputError("There are no documents.\nGive a list of them: documents (or texts).")
        if body.top_n is not None and body.top_n < 1:
            raise InputError(f"top_n is {body.top_n}; it must be 1 or more.")
        pairs = [Text(text=body.query, text_pair=document) for document in documents]
        items = await self._answers(request, self._task, pairs, OVERFLOWS[body.truncate])
        logits = np.array([item.answer for item in items], np.float32).reshape(len(items), 1)
        scores = (logits if body.raw_scores else activated(logits, self._task.activation))[:, 0]
        order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        if body.documents is None:
            kept = {index: {"text": documents[index]} if body.return_text else {} for index in order}
            return self._json([{"index": index, "score": float(scores[index]), **kept[index]} for index in order])
        results = [
            {"index": index, "relevance_score": float(scores[index])}
            | ({"document": {"text": documents[index]}} if body.return_documents else {})
            for index in order
        ]
        usage = {"total_tokens": _usage(items)["total_tokens"]}
        return self._json({"id": "", "model": self._manifest.name, "results": results, "usage": usage, "meta": {}})

    async def _predict(self, request: Request) -> Response:
        body = await self._body(request, PredictBody)
        task = self._task
        assert isinstance(task, TextClassification)
        alone, texts = _texts_or_pairs(body.inputs)
        if task.pairs is Pairs.REQUIRED and any(text.text_pair is None for text in texts):
            raise InputError('The model compares two texts.\nGive pairs of them: {"inputs": [["...", "..."]]}.')
        items = await self._answers(request, task, texts, OVERFLOWS[body.truncate])
        found = []
        for item in items:
            scores = item.answer if body.raw_scores else scores_of(item.answer, task)
            labels = sorted(zip(task.labels, map(float, scores), strict=True), key=lambda pair: -pair[1])
            found.append([{"label": label, "score": score} for label, score in labels])
        return self._json(found[0] if alone else found)

    async def _late_chunks(self, request: Request, chunks: list[str], body: EmbeddingsBody) -> list[TextItem]:
        """The inputs as chunks of one text, with a space between them."""
        if any(not isinstance(chunk, str) or not chunk for chunk in chunks):
            raise InputError("late_chunking reads texts that are not empty: the chunks of one document.")
        self._chunks = self._chunks or ChunkEmbeddings(self._manifest, None)
        ends = np.cumsum([len(chunk) + 1 for chunk in chunks]).tolist()
        spans = [(end - 1 - len(chunk), end - 1) for chunk, end in zip(chunks, ends, strict=True)]
        text = Text(text=" ".join(chunks), spans=spans)
        return await self._answers(request, self._chunks, [text], Overflow.SPLIT, prompt_name=body.prompt_name)

    async def _answers(
        self, request: Request, task: Task, texts: Sequence[Text], overflow: Overflow, *, prompt_name: str | None = None
    ) -> list[TextItem]:
        self._check_number(len(texts))
        has_prompt = task.prompts and texts[0].input_ids is None
        prompt = chosen_prompt(*prompts_of(self._manifest), name=prompt_name, prompt=None) if has_prompt else ""
        key = (task, overflow, prompt)
        if key not in self._inferences:
            stride = overlap_of(None, self._session.max_len) if task is self._chunks else 0
            reading = Reading.of(overflow=overflow, stride=stride)
            tokenizer = self._session.tokenizer.bounded(self._options.max_text_characters)
            self._inferences[key] = TextInference(self._session, task, reading, prompt=prompt, tokenizer=tokenizer)
        # Begun here: an application in which this one is mounted runs no lifespan of it.
        self._running = self._running or asyncio.create_task(self.queue.run())
        client = request.client
        items = await self.queue.answer(
            self._inferences[key], task, texts, client="" if client is None else f"{client.host}:{client.port}"
        )
        for number, item in enumerate(items):
            if isinstance(item.error, InputError):
                # The first line: others have the remedy for a command line.
                said, _, remedy = str(item.error).partition("\n")
                if overflow is Overflow.ERROR and "--overflow" in remedy:
                    words = '"end" or "split"' if item.text.input_ids is None else '"end"'
                    said += f" Longer texts: send truncate: {words}."
                raise InputError(f"input[{number}]: {said}")
            if item.error is not None:
                raise item.error
        return items

    def _check_number(self, texts: int) -> None:
        if not 1 <= texts <= self._options.max_texts:
            raise InputError(f"There are {texts} texts in the request; 1 to {self._options.max_texts} fit.")

    def _texts_or_ids(self, given: object) -> list[Text]:
        """OpenAI's ``input``: a text, texts, ids, or lists of ids."""
        if isinstance(given, str):
            return [Text(text=given)]
        if isinstance(given, list) and given:
            listed: list[Any] = [given] if _is_ids(given) else given
            # First: a body has room for millions. The chunks of one text are counted here, too.
            self._check_number(len(listed))
            if all(isinstance(each, str) for each in listed):
                return [Text(text=each) for each in listed]
            if all(_is_ids(each) for each in listed):
                return [Text(input_ids=each) for each in listed]
        raise InputError("input is neither a text, nor a list of texts, of ids, or of lists of ids.")

    def _shortened(self, vectors: Any, dimensions: int | None) -> Any:
        """The first dimensions, of length 1 where the bundle's vectors are."""
        shorter = truncated(vectors, dimensions)
        own = self._manifest.sentence
        return normalized(shorter) if dimensions is not None and own is not None and own.normalize else shorter

    async def _unless_gone(self, request: Request, answer: Answer) -> Response:
        """The answer, unless the client goes, or the time is over; its texts leave the queue then."""
        working = asyncio.ensure_future(asyncio.wait_for(answer(request), self._options.timeout_s))
        try:
            while not working.done():
                await asyncio.wait([working], timeout=0.5)
                if not working.done() and request.scope.get("hdexport.read") and await request.is_disconnected():
                    raise _RequestError(_GONE, "The client is gone.")
            return working.result()
        finally:
            working.cancel()

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        from starlette.requests import ClientDisconnect

        content = bytearray()
        try:
            async for part in request.stream():
                content += part
                if len(content) > self._options.max_body_bytes:
                    raise _RequestError(413, f"The body has more than {self._options.max_body_bytes} bytes.")
        except ClientDisconnect:
            raise _RequestError(_GONE, "The client is gone.") from None
        request.scope["hdexport.read"] = True
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InputError(f"The body is not valid: {error}") from None

    def _check_key(self, request: Request, path: str) -> None:
        if self._options.api_key is None or path in _OPEN:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.encode(), self._options.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise _RequestError(401, "The API key is missing or wrong: send Authorization: Bearer KEY.")

    def _json(self, content: object, status: int = 200, **headers: str) -> Response:
        from starlette.responses import Response

        encoded = msgspec.json.encode(content)
        return Response(encoded, status_code=status, media_type="application/json", headers=headers)

    def _error(self, status: int, message: str, *, retry_after: int | None = None) -> Response:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        error = {"message": message, "type": kinds.get(status, "invalid_request_error"), "param": None, "code": None}
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return self._json({"error": error}, status, **headers)


def _usage(items: Sequence[TextItem]) -> dict[str, int]:
    tokens = sum(len(item.encoding.whole) for item in items if item.encoding is not None)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _is_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)


def _document(given: str | dict[str, Any]) -> str:
    text = given if isinstance(given, str) else given.get("text")
    if not isinstance(text, str):
        raise InputError('A document is a text, or an object with one: {"text": "..."}.')
    return text


def _texts_or_pairs(given: object) -> tuple[bool, list[Text]]:
    """The texts of ``/predict``, and whether there is one that was not in a list."""
    if isinstance(given, str):
        return True, [Text(text=given)]
    if isinstance(given, list):
        if len(given) == 2 and all(isinstance(each, str) for each in given):
            return True, [Text(text=given[0], text_pair=given[1])]
        listed = [[each] if isinstance(each, str) else each for each in given]
        if all(
            isinstance(each, list) and len(each) in (1, 2) and all(isinstance(t, str) for t in each) for each in listed
        ):
            return False, [Text(text=each[0], text_pair=each[1] if len(each) > 1 else None) for each in listed]
    raise InputError("inputs is neither a text, nor a pair of texts, nor a list of either.")
