"""The routes of a server, an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import (
    BackendError,
    HdexportError,
    InputError,
    Message,
    NonFiniteOutputError,
    Setting,
    joined,
    write,
)
from hdruntime.optional import require
from hdruntime.serve.admission import OverloadedError, RequestTooLargeError
from hdruntime.serve.embedding_types import ranges_of_server
from hdruntime.serve.fair_queue import client_of
from hdruntime.serve.health import SessionHealth
from hdruntime.serve.interface import Answers, ModelNotFoundError, Route, ServedModel, ServeRequest
from hdruntime.serve.interfaces import interfaces, served_task
from hdruntime.serve.metrics import Metrics
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.queue import TextQueue
from hdruntime.serve.request_body import (
    LARGE_BYTES,
    Content,
    RequestBody,
    body_of,
    read_large_values,
    read_values,
    too_many_texts,
)
from hdruntime.serve.request_keys import request_key, request_message
from hdruntime.serve.running import RunningRequests, seconds_left
from hdruntime.session import Session
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_inference import TextInference, TextItem
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import Role
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import TextTokenizer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

Read = TypeVar("Read")
Handler = Callable[["Request"], Awaitable["Response"]]

_READY_SECONDS = 1.0
"""How long readiness waits for a text of one token: SageMaker waits two seconds for an answer, and Kubernetes one."""

_JSON_LINES = ("application/jsonlines", "application/x-jsonlines", "application/jsonl", "application/x-ndjson")
"""Content types of JSON lines."""

_KEPT_TOKENIZERS = 8
"""Maximum tokenizers with the limits of requests; such a tokenizer is a copy of several megabytes."""

_KEPT_INFERENCES = 64
"""Maximum combinations of a task, a treatment of long texts and a prompt that are kept; requests make tasks."""

_CLIENT_CLOSED_REQUEST = 499
"""The status of a request whose client has disconnected, for the metrics, as nginx has it."""


_TRUNCATED = "X-Truncated-Inputs"
"""The header of a response with the numbers of the inputs that were truncated."""

_RANGES_CHARACTERS = 1000
"""Length after which the header counts the rest of the numbers: proxies accept 4 to 8 KB of headers in all."""

_BODY_SECONDS = 2.0
"""How long a server that is stopped waits for the rest of a request's body."""


_STATUS_OF_ERROR: Mapping[type[HdexportError], int] = {
    OverloadedError: 429,
    RequestTooLargeError: 413,
    ModelNotFoundError: 404,
    InputError: 400,
}
"""Statuses of errors of which a request is the cause; the first class that an error belongs to counts."""


class _RequestError(Exception):
    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def application(
    bundle: Bundle, session: Session, options: ServeOptions, *, is_stopping: Callable[[], bool] = lambda: False
) -> Any:
    """The ASGI application; the session stays open when the application ends.

    A process serves with a session that the process itself has loaded. An application that was made before a fork, as
    by gunicorn's ``preload``, refuses to start after the fork; without a lifespan it answers 503.

    Args:
        bundle: the bundle of the session.
        session: that runs all texts.
        options: options of the server. The address, and what concerns connections, is the HTTP server's.
        is_stopping: whether the HTTP server accepts no more requests; bodies that have not arrived are then refused.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        InputError: the bundle has no tokenizer, or a task that has no route.
    """
    require("starlette")
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Route as StarletteRoute

    server = _Server(bundle, session, options, is_stopping)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        server.start()
        try:
            yield
        finally:
            server.close()

    # The routes of interfaces first, since routes are tried in turn.
    endpoints = {(_method(route), route.path): _Endpoint(server.counted(route)) for route in server.routes()}
    routes = [StarletteRoute(path, each, methods=[method]) for (method, path), each in reversed(endpoints.items())]
    errors: dict[Any, Any] = {404: server.unknown, 405: server.unknown}
    middleware = []
    if options.cors_origin:
        # A preflight request has no key: CORS answers it before the key is checked. Clients send custom headers.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[_TRUNCATED],
        )
        middleware.append(cors)
    served = Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=errors)
    if not options.root_path and not middleware:

        async def at_once(scope: Any, receive: Any, send: Any) -> None:
            # Starlette's layers, and its search by regular expressions, cost as much as tokenizing a short text.
            route = scope.get("method"), scope.get("path")
            endpoint = None if scope.get("root_path") else endpoints.get(route)
            await (endpoint or served)(scope, receive, send)

        return at_once
    if not options.root_path:
        return served

    async def under_root_path(scope: Any, receive: Any, send: Any) -> None:
        # Not uvicorn's root_path, which assumes that the proxy has removed the prefix.
        scope["root_path"] = scope.get("root_path", "") + options.root_path
        if scope.get("path") == scope["root_path"]:
            scope["path"] += "/"
        await served(scope, receive, send)

    return under_root_path


class _Endpoint:
    """A handler as an ASGI application, so that Starlette does not handle exceptions: the handler does."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class _Server:
    def __init__(
        self, bundle: Bundle, session: Session, options: ServeOptions, is_stopping: Callable[[], bool]
    ) -> None:
        self._session, self._options, self._manifest = session, options, bundle.manifest
        self._is_stopping, self._stopping_since = is_stopping, math.inf
        self._task = served_task(bundle)
        if options.truncate == "split" and not self._task.splits:
            accepted = f"error or end: texts of {bundle.manifest.task} are not split"
            raise InputError(parameter="truncate", value=options.truncate, accepted=accepted)
        self._inferences: dict[tuple[TextTask, Overflow, str], TextInference] = {}
        self._queue_task: asyncio.Task[None] | None = None
        self._requests = RunningRequests(options.timeout, self._reason_to_stop)
        max_queue_tokens = options.queue_tokens()
        self._has_ended = False
        self.tokenizer = session.tokenizer.bounded(options.max_text_characters)
        self._model = ServedModel(
            task=self._task,
            session=session,
            options=options,
            max_queue_tokens=max_queue_tokens,
            tokenizer=self.tokenizer,
            ranges=ranges_of_server(options.ranges, self._manifest),
        )
        self._tokenizer_of = functools.cache(self._new_tokenizer)
        self._limited = functools.lru_cache(_KEPT_TOKENIZERS)(TextTokenizer.limited)
        self._health = SessionHealth(session, self._task)
        self.queue = TextQueue(
            batch_tokens=session.batch_tokens,
            max_tokens=max_queue_tokens,
            max_wait_s=options.max_wait_ms / 1000,
            on_batch=lambda texts, tokens: self.metrics.batch(texts, tokens),
        )
        self.metrics = Metrics(lambda: self.queue.tokens, lambda: session.padding)

    def start(self) -> None:
        """Run a text, for which readiness waits; a BackendError if this process can answer no request."""
        reason = self._unavailable_reason()
        if reason:
            raise BackendError(
                reason, hint="Load the bundle in each process that serves; leave out gunicorn --preload."
            )
        self._health.probe()

    def close(self) -> None:
        """End the queue."""
        self._has_ended = True
        if self._queue_task is not None:
            self._queue_task.cancel()
        self._requests.close()
        self.queue.close()

    def routes(self) -> list[Route]:
        """The routes for the bundle's task."""
        of_interfaces = [route for interface in interfaces() for route in interface(self._model).routes()]
        return [
            Route("/health", None, self._get_health, is_open=True),
            Route("/ready", None, self._get_ready, is_open=True),
            Route("/metrics", None, self._get_metrics),
            *of_interfaces,
        ]

    def counted(self, route: Route) -> Handler:
        """The route's response, counted, or its error as OpenAI writes it, unless the interface writes others."""
        path = route.path

        error_of = functools.partial(self._error, route.error)

        async def checked(request: Request) -> Response:
            began, status = time.monotonic(), _CLIENT_CLOSED_REQUEST
            try:
                if not route.is_open:
                    self._check_key(request)
                response = await self._requests.answered(request, functools.partial(self._response, route))
                status = response.status_code
                return response
            except _RequestError as error:
                status = error.status
                return error_of(error.status, str(error), retry_after=error.retry_after)
            except (OverloadedError, InputError) as error:
                status = next(code for kind, code in _STATUS_OF_ERROR.items() if isinstance(error, kind))
                retry_after = error.retry_after if isinstance(error, OverloadedError) else None
                return error_of(status, request_message(error), retry_after=retry_after)
            except NonFiniteOutputError as error:
                # The texts or the device cause it: the server tries whether other texts get answers.
                status = 422
                logger.error("%s: %s", path, error)
                self._health.doubt()
                return error_of(status, write(error.problem, request_key))
            except asyncio.CancelledError:
                status = 503
                return error_of(status, "The server stops before the request is answered.", retry_after=1)
            except TimeoutError:
                status = 503
                return error_of(status, f"No answer within {self._options.timeout:g} seconds.", retry_after=1)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException:  # tokenizers' panics are no Exception
                # The client gets no detail, and the log no text of a client.
                status = 500
                logger.error("%s failed", path, exc_info=True)
                self._health.doubt()
                return error_of(status, "The server failed; its log has the reason.")
            finally:
                self.metrics.request(path, status, time.monotonic() - began)

        return checked

    async def unknown(self, request: Request, error: Any) -> Response:
        """The response to an unknown path, and to a method that a path does not have."""
        root = self._options.root_path
        paths = ", ".join(f"{_method(route)} {root}{route.path}" for route in self.routes())
        return self._error(None, error.status_code, f"There is no such route for the bundle's task; there are {paths}.")

    async def _response(self, route: Route, request: Request) -> Response:
        from starlette.responses import Response

        serve_request = _ServeRequest(self, request)
        if route.lines is not None and _has_json_lines(request):
            lines = await self._read(request, functools.partial(_read_lines, options=self._options))
            answers = cast(list[object], await route.lines(serve_request, lines))
            content = b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)
            response = Response(content, media_type=_JSON_LINES[0])
        else:
            body = None if route.body is None else await self._body(request, route.body)
            answer = await route.handler(serve_request, body)
            response = answer if isinstance(answer, Response) else self._json(answer)
        if serve_request.truncated:
            self.metrics.truncated(route.path, self._manifest.name, len(serve_request.truncated))
            response.headers[_TRUNCATED] = _ranges(serve_request.truncated)
        return response

    async def _get_health(self, request: ServeRequest, body: None) -> object:
        request.check_alive()
        return {"status": "ok"}

    async def _get_ready(self, request: ServeRequest, body: None) -> object:
        await request.check_ready()
        return {"status": "ok"}

    def check_alive(self) -> None:
        """See `ServeRequest.check_alive`."""
        self._check_available()
        if self._health.failure:
            # Run again, since it may work by now.
            self._health.probe()
            raise _RequestError(503, self._health.failure)

    async def check_ready(self) -> None:
        """See `ServeRequest.check_ready`: whether a text was answered since the start, and since the last failure."""
        self._check_available()
        if not self._health.has_worked:
            # The text runs on if this client disconnects, for the next client that asks.
            await asyncio.wait([self._health.probe()], timeout=_READY_SECONDS)
            if not self._health.has_worked:
                raise _RequestError(503, self._health.failure or "A text of one token is running.")

    def _check_available(self) -> None:
        reason = self._unavailable_reason()
        if reason:
            raise _RequestError(503, reason)

    def _unavailable_reason(self) -> str:
        """Why this process can answer no request; empty if it can."""
        try:
            _ = self._session.batch_tokens
        except BackendError as error:
            return write(error.problem, request_key)
        if self._has_ended or (self._queue_task is not None and self._queue_task.done()):
            return "The queue of texts has ended; start the server again."
        return ""

    async def _get_metrics(self, request: ServeRequest, body: None) -> Response:
        from starlette.responses import Response

        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def answers(
        self,
        request: _ServeRequest,
        body: RequestBody,
        texts: Sequence[Text],
        *,
        task: TextTask | None = None,
        overflow: Overflow | None = None,
        stride: int = 0,
        prompt_name: str | None = None,
        max_tokens_each: tuple[int | None, int | None] = (None, None),
    ) -> Answers:
        """See `ServeRequest.answers`."""
        self.check_number(len(texts))
        self._check_available()
        overflow = body.overflow if overflow is None else overflow
        _check_splits(task or self._task, overflow)
        has_prompt = (task or self._task).prompts and texts[0].input_ids is None
        prompt = chosen_prompt(*prompts_of(self._manifest), name=prompt_name, prompt=None) if has_prompt else ""
        is_pair = texts[0].text_pair is not None
        whole = self._tokenizer_of((task or self._task).role)
        tokenizer = self._request_tokenizer(whole, body, overflow, max_tokens_each, is_pair=is_pair)
        inference = self._inference(task or self._task, overflow, stride, prompt, tokenizer)
        # Started here: an application in which this application is mounted does not run its lifespan.
        if self._queue_task is None:
            self._queue_task = asyncio.create_task(self.queue.run())
            self._queue_task.add_done_callback(_log_failure)
        client = request.request.client
        items = await self.queue.answer(
            inference,
            task or self._task,
            texts,
            client="" if client is None else client_of(client.host),
            within_s=seconds_left(request.request),
        )
        _raise_errors(items, overflow, splits=(task or self._task).splits)
        encodings = [item.encoding.whole for item in items if item.encoding is not None]
        truncated = {number: encoding for number, encoding in enumerate(encodings) if encoding.is_truncated}
        request.truncated.update(truncated)
        return Answers([item.answer for item in items], sum(map(len, encodings)), truncated)

    def _inference(
        self, task: TextTask, overflow: Overflow, stride: int, prompt: str, tokenizer: TextTokenizer | None
    ) -> TextInference:
        """What runs the texts of a request; kept for other requests unless the request has a tokenizer of its own."""
        key = (task, overflow, prompt)
        if tokenizer is None and key in self._inferences:
            return self._inferences[key]
        options = EncodeOptions.of(overflow=overflow, stride=stride)
        inference = TextInference(
            self._session, task, options, prompt=prompt, tokenizer=tokenizer or self._tokenizer_of(task.role)
        )
        if tokenizer is None:
            if len(self._inferences) >= _KEPT_INFERENCES:
                self._inferences.pop(next(iter(self._inferences)))
            self._inferences[key] = inference
        return inference

    def _new_tokenizer(self, role: Role | None) -> TextTokenizer:
        """The tokenizer of texts of a role, with the server's limits."""
        if role is None:
            return self.tokenizer
        return self._session.tokenizer_of(role=role).bounded(self._options.max_text_characters)

    def _request_tokenizer(
        self,
        tokenizer: TextTokenizer,
        body: RequestBody,
        overflow: Overflow,
        max_tokens_each: tuple[int | None, int | None],
        *,
        is_pair: bool,
    ) -> TextTokenizer | None:
        """The tokenizer with a request's own limits, or None if the request has no limits."""
        max_tokens = body.token_limit(tokenizer, is_pair=is_pair)
        limits = [
            None if limit is None or (limit >= max_tokens and overflow is Overflow.TRUNCATE) else limit
            for limit in max_tokens_each
        ]
        if any(limit is not None and limit < 1 for limit in limits):
            raise InputError("max_tokens_per_doc and max_tokens_per_query must be 1 or more, or 0 for no limit.")
        if (max_tokens, limits, body.side) == (tokenizer.max_len, [None, None], None):
            return None
        return self._limited(tokenizer, max_tokens, text=limits[0], pair=limits[1], side=body.side)

    def check_number(self, texts: int) -> None:
        """See `ServeRequest.check_number`."""
        if not 1 <= texts <= self._options.max_texts:
            raise too_many_texts(texts, self._options.max_texts)

    async def _reason_to_stop(self, request: Request) -> Exception | None:
        """The error of a request whose client has disconnected, or that this process can no longer answer."""
        if reason := self._unavailable_reason():
            return _RequestError(503, reason)
        is_read = request.scope.get("hdexport.read")
        if is_read:
            return (
                _RequestError(_CLIENT_CLOSED_REQUEST, "The client has disconnected.")
                if await request.is_disconnected()
                else None
            )
        # Others than False have no body.
        if is_read is False and self._is_stopping():
            self._stopping_since = min(self._stopping_since, time.monotonic())
            if time.monotonic() - self._stopping_since >= _BODY_SECONDS:
                return _RequestError(503, "The server stops, and the request's body has not arrived.", retry_after=1)
        return None

    async def _read(self, request: Request, read: Callable[[bytearray, int], Read]) -> Read:
        """What is read of a request's body, by a function that takes it and the maximum ids of a text: beside the event
        loop, where it is large."""
        request.scope["hdexport.read"] = False
        content, has_more = bytearray(), True
        while has_more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise _disconnected()
            content += message.get("body", b"")
            if len(content) > self._options.max_body_bytes:
                raise _RequestError(413, f"The body has more than {self._options.max_body_bytes} bytes.")
            has_more = message.get("more_body", False)
        request.scope["hdexport.read"] = True
        # As a text of so many characters, see `Text.characters`.
        max_ids = max(self._options.max_text_characters // 4, self.tokenizer.max_len)
        if len(content) <= LARGE_BYTES:
            return read(content, max_ids)
        return await asyncio.to_thread(read, content, max_ids)

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        def read(content: bytearray, max_ids: int) -> Any:
            values = _values(content, self._options, max_ids)
            return values if kind is dict else self.body(values, kind)

        return await self._read(request, read)

    def body(self, values: Mapping[str, Any], kind: type[Content]) -> Content:
        """See `ServeRequest.body`."""
        body, truncate = body_of(values, kind), self._options.truncate
        if isinstance(body, RequestBody) and truncate is not None and not body.says_overflow:
            body.truncate = truncate
        return body

    def _check_key(self, request: Request) -> None:
        if self._options.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.encode(), self._options.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise _RequestError(401, "The API key is missing or wrong: send Authorization: Bearer KEY.")

    def _json(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        from starlette.responses import Response

        encoded = msgspec.json.encode(content)
        return Response(encoded, status_code=status, media_type="application/json", headers=headers)

    def _error(
        self,
        error: Callable[[str], object] | None,
        status: int,
        message: str,
        *,
        retry_after: int | None = None,
    ) -> Response:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        openai = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return self._json(openai if error is None else error(message), status, headers)


class _ServeRequest:
    """See `ServeRequest`."""

    def __init__(self, server: _Server, request: Request) -> None:
        self.tokenizer, self.check_number, self.body = server.tokenizer, server.check_number, server.body
        self.check_alive, self.check_ready = server.check_alive, server.check_ready
        self.request, self.truncated = request, set[int]()
        self.path_parameters: Mapping[str, str] = request.path_params
        self.answers = functools.partial(server.answers, self)
        self.part = functools.partial(_ServeRequest, server, request)


def _method(route: Route) -> str:
    return "GET" if route.body is None else "POST"


def _has_json_lines(request: Request) -> bool:
    """Whether a body is JSON lines; a type that is neither these nor JSON is refused, unless it is a client's default
    for any data."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _JSON_LINES:
        return True
    if kind not in ("", "application/octet-stream", "application/x-www-form-urlencoded") and "json" not in kind:
        raise _RequestError(
            415, f"The content type is {kind}; it must be application/json, or {_JSON_LINES[0]} for JSON lines."
        )
    return False


def _values(content: bytes | bytearray, options: ServeOptions, max_ids: int) -> dict[str, Any]:
    if len(content) <= LARGE_BYTES:
        return read_values(content)
    return read_large_values(content, max_texts=options.max_texts, max_ids=max_ids)


def _read_lines(content: bytearray, max_ids: int, *, options: ServeOptions) -> list[dict[str, Any]]:
    """The objects of JSON lines; an empty line is none."""
    lines = content.rstrip()
    # Counted before they are made.
    if not lines or (count := lines.count(b"\n") + 1) > options.max_texts:
        raise too_many_texts(count if lines else 0, options.max_texts)
    return [_values(line, options, max_ids) for line in lines.split(b"\n") if line.strip()]


def _disconnected() -> _RequestError:
    return _RequestError(_CLIENT_CLOSED_REQUEST, "The client has disconnected.")


def _check_splits(task: TextTask, overflow: Overflow) -> None:
    if overflow is Overflow.SPLIT and not task.splits:
        raise InputError(
            f"The bundle's task is {task.manifest.task}, whose texts are not split.",
            hint=("Truncate them: send ", Setting("overflow", Overflow.TRUNCATE), "."),
        )


def _raise_errors(items: Sequence[TextItem], overflow: Overflow, *, splits: bool) -> None:
    """Raise the error of the first text that does not fit, or of all texts whose outputs are not finite."""
    for number, item in enumerate(items):
        if isinstance(item.error, InputError):
            hint = _too_long_hint(item, overflow, splits) if item.error.names("overflow") else item.error.hint
            raise InputError(f"input[{number}]: ", *joined(item.error.problem), hint=hint)
        if item.error is not None and not isinstance(item.error, NonFiniteOutputError):
            raise item.error
    failed = [(number, item.error) for number, item in enumerate(items) if item.error is not None]
    if failed:
        names = ", ".join(f"input[{number}]" for number, _ in failed)
        rest = f" Send the others without {'it' if len(failed) == 1 else 'them'}." if len(items) > len(failed) else ""
        raise NonFiniteOutputError(f"{names}: ", *joined(failed[0][1].problem), rest)


def _too_long_hint(item: TextItem, overflow: Overflow, splits: bool) -> Message:
    """What a client can do about a text of too many tokens; ids cannot be split, nor texts of some tasks."""
    truncate = ("Truncate it: send ", Setting("overflow", Overflow.TRUNCATE))
    if item.text.input_ids is not None or not splits:
        return (*truncate, ".")
    if overflow is Overflow.ERROR:
        return (*truncate, ", or run it in chunks: send ", Setting("overflow", Overflow.SPLIT), ".")
    return ""


def _ranges(numbers: Collection[int]) -> str:
    """Ascending numbers and ranges: ``0,3-5``; after very many ranges, the number of further numbers: ``0,2,4,+97``."""
    shown: list[str] = []
    ordered, left, size = sorted(numbers), len(numbers), 0
    for _, group in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        if size > _RANGES_CHARACTERS:
            return ",".join([*shown, f"+{left}"])
        shown.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        left, size = left - len(run), size + len(shown[-1]) + 1
    return ",".join(shown)


def _log_failure(queue: asyncio.Task[None]) -> None:
    """Log why the queue of texts has ended, unless it was cancelled."""
    if not queue.cancelled() and (fault := queue.exception()) is not None:
        logger.error("the queue of texts has ended", exc_info=fault)
