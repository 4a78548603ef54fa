"""The routes of a server, an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, InputError
from hdruntime.optional import require
from hdruntime.serve.answering import scores_of, served_task
from hdruntime.serve.bodies import Body, EmbedBody, EmbeddingsBody, PredictBody, RerankBody, SparseBody, read_body
from hdruntime.serve.metrics import Metrics
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.queue import QueueFullError, TextQueue
from hdruntime.session import Session
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.late_chunks import ChunkEmbeddings
from hdruntime.tasks.reading import Reading
from hdruntime.tasks.sparse_similarity import SparseVectors
from hdruntime.tasks.task import Pairs, Text, TextTask
from hdruntime.tasks.text_classification import TextClassification
from hdruntime.tasks.text_inference import TextInference, TextItem
from hdruntime.text.chunking import overlap_of
from hdruntime.text.embeddings import normalized, truncated
from hdruntime.text.logits import activated
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import Overflow, TextTokenizer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

Answer = Callable[["Request"], Awaitable["Response"]]

_OPEN = ("/health", "/ready")
"""Routes that need no key."""

_KEPT_TOKENIZERS = 8
"""Tokenizers with limits of requests; one with a limit on whole texts is a copy of several megabytes."""

_GONE = 499
"""The status of a request whose client is gone, for the metrics; nobody reads the answer."""


class _RequestError(Exception):
    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def application(bundle: Bundle, session: Session, options: ServeOptions) -> Any:
    """The ASGI application; the session stays open when the application ends.

    A process serves with a session that it loaded itself: an application that is made before a fork, as by gunicorn's
    ``--preload``, refuses to start in the fork, and where it runs no lifespan it answers 503.

    Args:
        bundle: the bundle of the session.
        session: that runs all texts.
        options: limits, and the browsers and the path that are served.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        InputError: the bundle has no tokenizer, or a task that has no route.
    """
    require("starlette")
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Route

    server = _Server(bundle, session, options)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        server.start()
        try:
            yield
        finally:
            server.close()

    routes = [Route(path, server.answered(path, answer), methods=[method]) for method, path, answer in server.routes()]
    errors: dict[Any, Any] = {404: server.unknown, 405: server.unknown}
    middleware = []
    if options.cors_origins:
        # A preflight has no key: it is answered before the key is asked for. Clients send headers of their own.
        cors = Middleware(
            CORSMiddleware, allow_origins=options.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
        middleware.append(cors)
    served = Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=errors)
    if not options.root_path:
        return served

    async def under_root_path(scope: Any, receive: Any, send: Any) -> None:
        # Not uvicorn's own root path, which takes it for granted that the proxy has cut it off.
        scope["root_path"] = scope.get("root_path", "") + options.root_path
        await served(scope, receive, send)

    return under_root_path


class _Server:
    def __init__(self, bundle: Bundle, session: Session, options: ServeOptions) -> None:
        self._session, self._options, self._manifest = session, options, bundle.manifest
        self._task = served_task(bundle)
        self._chunks: ChunkEmbeddings | None = None
        self._inferences: dict[tuple[TextTask, Overflow, str], TextInference] = {}
        self._running: asyncio.Task[None] | None = None
        self._has_ended = False
        self._tokenizer = session.tokenizer.bounded(options.max_text_characters)
        self._limited = functools.lru_cache(_KEPT_TOKENIZERS)(self._tokenizer.limited)
        self._probing: asyncio.Task[None] | None = None
        # Whether a text ran since the last failure, and why the last one failed.
        self._has_worked, self._broken = False, ""
        self.queue = TextQueue(
            batch_tokens=session.batch_tokens,
            most_tokens=options.queue_tokens(),
            max_wait_s=options.max_wait_ms / 1000,
            on_batch=lambda texts, tokens: self.metrics.batch(texts, tokens),
        )
        self.metrics = Metrics(lambda: self.queue.tokens, lambda: session.padding)

    def start(self) -> None:
        """Run a text, on which readiness waits.

        Raises:
            BackendError: no request could be answered in this process.
        """
        fault = self._fault()
        if fault:
            raise BackendError(f"{fault}\nLoad the bundle in each process that serves; leave out gunicorn --preload.")
        self._probe()

    def close(self) -> None:
        """End the queue."""
        self._has_ended = True
        if self._running is not None:
            self._running.cancel()
        self.queue.close()

    def routes(self) -> list[tuple[str, str, Answer]]:
        """Method, path and answer of the routes that fit the bundle's task."""
        always: list[tuple[str, str, Answer]] = [
            ("GET", "/health", self._health),
            ("GET", "/ready", self._ready),
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
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException:  # tokenizers' panics are no Exception
                # The client gets no detail, and the log no text of a client's.
                status, self._has_worked = 500, False
                logger.error("%s failed", path, exc_info=True)
                self._probe()
                return self._error(status, "The server failed; its log has the reason.")
            finally:
                self.metrics.requests.labels(path, status).inc()
                self.metrics.seconds.labels(path).observe(time.monotonic() - began)

        return checked

    async def unknown(self, request: Request, error: Any) -> Response:
        """The answer to an unknown path, and to a method that a path has not."""
        root = self._options.root_path
        paths = ", ".join(f"{method} {root}{path}" for method, path, _ in self.routes())
        return self._error(error.status_code, f"There is no such route for the bundle's task; there are {paths}.")

    async def _health(self, request: Request) -> Response:
        """Whether the process can answer at all: a restart is the remedy where it cannot."""
        self._check_fault()
        if self._broken:
            # Asked again, for it may work by now.
            self._probe()
            raise _RequestError(503, self._broken)
        return self._json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether a text was answered since the start, and since the last failure."""
        self._check_fault()
        if not self._has_worked:
            # The text runs on if this client goes, for the next one that asks.
            await asyncio.wait([self._probe()])
            if not self._has_worked:
                raise _RequestError(503, self._broken or "A text is being tried.")
        return self._json({"status": "ok"})

    def _check_fault(self) -> None:
        fault = self._fault()
        if fault:
            raise _RequestError(503, fault)

    def _fault(self) -> str:
        """Why this process can answer nothing; empty if it can."""
        try:
            _ = self._session.batch_tokens
        except BackendError as error:
            return str(error).partition("\n")[0]
        if self._has_ended or (self._running is not None and self._running.done()):
            return "The queue of texts has ended; start the server again."
        return ""

    def _probe(self) -> asyncio.Task[None]:
        """A text that runs beside the queue's, which may be long; one at a time."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probed())
        return self._probing

    async def _probed(self) -> None:
        try:
            await asyncio.to_thread(self._run_a_text)
        except Exception:
            logger.error("a text of one token failed", exc_info=True)
            self._has_worked, self._broken = False, "A text of one token fails; the server's log has the reason."
        else:
            self._has_worked, self._broken = True, ""

    def _run_a_text(self) -> None:
        sample = self._session.tokenizer.sample
        text = Text(text=sample, text_pair=sample if self._task.pairs is Pairs.REQUIRED else None)
        inference = TextInference(self._session, self._task, Reading.of(overflow=Overflow.TRUNCATE))
        (item,) = inference.encode([text])
        inference.run([item])
        if isinstance(item.error, BackendError):
            raise item.error

    async def _metrics(self, request: Request) -> Response:
        from starlette.responses import Response

        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _models(self, request: Request) -> Response:
        manifest = self._manifest
        model = {"id": manifest.name, "object": "model", "created": 0, "owned_by": "hdexport", "task": manifest.task}
        return self._json({"object": "list", "data": [model | {"max_model_len": manifest.max_len}]})

    async def _embeddings(self, request: Request) -> Response:
        body = await self._body(request, EmbeddingsBody)
        texts = self._texts_or_ids(body)
        if body.late_chunking:
            if body.truncate_prompt_tokens is not None:
                raise InputError("late_chunking reads whole texts.\nLeave out truncate_prompt_tokens.")
            items = await self._late_chunks(request, [text.text for text in texts], body)
            vectors = items[0].answer.vectors
        else:
            items = await self._answers_of(request, body, texts, prompt_name=body.prompt_name)
            vectors = np.stack([item.answer for item in items])
        vectors = self._shortened(vectors, body.dimensions)
        vectors = normalized(vectors) if body.normalize else vectors
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
        return await self._answers_of(request, body, [Text(text=text) for text in inputs], prompt_name=body.prompt_name)

    async def _rerank(self, request: Request) -> Response:
        body = await self._body(request, RerankBody)
        assert isinstance(self._task, TextClassification)
        documents = [_document(each) for each in (body.texts if body.documents is None else body.documents) or ()]
        if not documents:
            raise InputError("There are no documents.\nGive a list of them: documents (or texts).")
        if body.top_n is not None and body.top_n < 1:
            raise InputError(f"top_n is {body.top_n}; it must be 1 or more.")
        pairs = [Text(text=body.query, text_pair=document) for document in documents]
        items = await self._answers_of(
            request, body, pairs, most_of_each=(body.max_tokens_per_query or None, body.max_tokens_per_doc or None)
        )
        logits = np.array([item.answer for item in items], np.float32).reshape(len(items), 1)
        is_raw = body.raw_scores or not body.use_activation
        scores = (logits if is_raw else activated(logits, self._task.activation))[:, 0]
        order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        if body.documents is None:
            kept = {index: {"text": documents[index]} if body.return_text else {} for index in order}
            return self._json([{"index": index, "score": float(scores[index]), **kept[index]} for index in order])
        results = [
            {"index": index, "relevance_score": float(scores[index])}
            | ({"document": {"text": documents[index]}} if body.return_documents else {})
            for index in order
        ]
        answer = {"id": "", "model": self._manifest.name, "usage": _usage(items), "meta": {}}
        if body.truncation is not None:
            # Voyage's key, which its client always sends, and that client reads the results there.
            return self._json(answer | {"object": "list", "data": results})
        return self._json(answer | {"results": results})

    async def _predict(self, request: Request) -> Response:
        body = await self._body(request, PredictBody)
        task = self._task
        assert isinstance(task, TextClassification)
        alone, texts = _texts_or_pairs(body.inputs)
        if task.pairs is Pairs.REQUIRED and any(text.text_pair is None for text in texts):
            raise InputError('The model compares two texts.\nGive pairs of them: {"inputs": [["...", "..."]]}.')
        items = await self._answers_of(request, body, texts)
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

    async def _answers_of(
        self,
        request: Request,
        body: Body,
        texts: Sequence[Text],
        *,
        prompt_name: str | None = None,
        most_of_each: tuple[int | None, int | None] = (None, None),
    ) -> list[TextItem]:
        """The texts' answers, as long as the body's keys say."""
        overflow, tokenizer = body.overflow, None
        most = self._most_tokens(body, is_pair=texts[0].text_pair is not None) if texts else self._session.max_len
        each = [
            None if limit is None or (limit >= most and overflow is Overflow.TRUNCATE) else limit
            for limit in most_of_each
        ]
        if any(limit is not None and limit < 1 for limit in each):
            raise InputError("max_tokens_per_doc and max_tokens_per_query are 1 or more, or 0 for no limit.")
        if most < self._session.max_len or each != [None, None]:
            tokenizer = self._limited(most, text=each[0], pair=each[1])
        return await self._answers(request, self._task, texts, overflow, prompt_name=prompt_name, tokenizer=tokenizer)

    def _most_tokens(self, body: Body, *, is_pair: bool) -> int:
        """Most tokens of a text or a pair; vLLM's -1 stands for the bundle's number."""
        asked, most = body.truncate_prompt_tokens, self._session.max_len
        if asked is None or asked == -1:
            return most
        special = self._session.tokenizer.whole.num_special_tokens_to_add(is_pair)
        if asked <= special:
            raise InputError(
                f"truncate_prompt_tokens is {asked}, of which the special tokens are {special}.\n"
                f"Give {special + 1} or more, or -1 for as many as fit."
            )
        return min(asked, most)

    async def _answers(
        self,
        request: Request,
        task: TextTask,
        texts: Sequence[Text],
        overflow: Overflow,
        *,
        prompt_name: str | None = None,
        tokenizer: TextTokenizer | None = None,
    ) -> list[TextItem]:
        self._check_number(len(texts))
        self._check_fault()
        has_prompt = task.prompts and texts[0].input_ids is None
        prompt = chosen_prompt(*prompts_of(self._manifest), name=prompt_name, prompt=None) if has_prompt else ""
        key = (task, overflow, prompt)
        inference = self._inferences.get(key) if tokenizer is None else None
        if inference is None:
            stride = overlap_of(None, self._session.max_len) if task is self._chunks else 0
            reading = Reading.of(overflow=overflow, stride=stride)
            inference = TextInference(
                self._session, task, reading, prompt=prompt, tokenizer=tokenizer or self._tokenizer
            )
        if tokenizer is None:
            self._inferences[key] = inference
        # Begun here: an application in which this one is mounted runs no lifespan of it.
        self._running = self._running or asyncio.create_task(self.queue.run())
        client = request.client
        items = await self.queue.answer(
            inference, task, texts, client="" if client is None else f"{client.host}:{client.port}"
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

    def _texts_or_ids(self, body: EmbeddingsBody) -> list[Text]:
        """OpenAI's ``input``: a text, texts, ids, or lists of ids."""
        given = body.input
        if isinstance(given, str):
            return [Text(text=given)]
        if isinstance(given, list) and given:
            listed: list[Any] = [given] if _is_ids(given) else given
            # First: a body has room for millions. The chunks of one text are counted here, too.
            self._check_number(len(listed))
            if all(isinstance(each, str) for each in listed):
                return [Text(text=each) for each in listed]
            if all(_is_ids(each) for each in listed):
                return self._texts_of_ids(body, listed)
        raise InputError("input is neither a text, nor a list of texts, of ids, or of lists of ids.")

    def _texts_of_ids(self, body: EmbeddingsBody, listed: list[list[int]]) -> list[Text]:
        """Ids of the bundle's tokenizer, which LangChain's class sends of OpenAI's unless it is told not to."""
        tokenizer = self._session.tokenizer
        most = self._most_tokens(body, is_pair=False) if body.overflow is Overflow.TRUNCATE else None
        texts = []
        for number, ids in enumerate(listed):
            try:
                texts.append(Text(input_ids=tokenizer.checked_ids(ids, most=most)))
            except InputError as error:
                raise InputError(
                    f"input[{number}]: {error} Send texts, or that tokenizer's ids with special tokens. LangChain's "
                    "OpenAIEmbeddings sends OpenAI's ids, and with check_embedding_ctx_length=False texts."
                ) from None
        return texts

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
                if working.done():
                    break
                self._check_fault()
                if request.scope.get("hdexport.read") and await request.is_disconnected():
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
        return read_body(content, kind)

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
