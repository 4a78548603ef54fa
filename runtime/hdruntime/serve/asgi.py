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
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, HdexportError, InputError, NonFiniteOutputError, write
from hdruntime.optional import require
from hdruntime.serve.admission import OverloadedError, RequestTooLargeError
from hdruntime.serve.fair_queue import client_of
from hdruntime.serve.interface import Answers, ModelNotFoundError, Route, ServedModel, ServeRequest
from hdruntime.serve.metrics import Metrics
from hdruntime.serve.openapi import description
from hdruntime.serve.options import ServeOptions
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
from hdruntime.serve.running_model import LoadedModel, RunningModel, check_names
from hdruntime.session import Session
from hdruntime.tasks.task import Text

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

_MODELS = "/models/"
"""Prefix of the routes of one model: ``/models/NAME/embed``."""

_IS_LARGE = "hdexport.is_large"
"""The key that says, in a request's scope, whether its body is large."""

_MODEL = "hdexport.model"
"""The key of the model, in a request's scope, that the path's prefix or the request has chosen."""

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


def application(bundle: Bundle, session: Session, options: ServeOptions, *, ranges: str | None = None) -> Any:
    """The ASGI application of one bundle in one session; see `LoadedModel` and `application_of_models`."""
    return application_of_models([LoadedModel(bundle=bundle, sessions=[session], ranges=ranges)], options)


def application_of_models(
    models: Sequence[LoadedModel], options: ServeOptions, *, is_stopping: Callable[[], bool] = lambda: False
) -> Any:
    """The ASGI application; sessions stay open when the application ends.

    A process serves with sessions that the process itself has loaded. An application that was made before a fork, as by
    gunicorn's ``preload``, refuses to start after the fork; without a lifespan it answers 503.

    Args:
        models: one model, which is meant whatever a request's ``model`` is, or several with different names.
        options: options of the server. The address, and what concerns connections, is the HTTP server's.
        is_stopping: whether the HTTP server accepts no more requests; bodies that have not arrived are then refused.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        InputError: a bundle has no tokenizer, or a task that has no route; or two models have one name.
    """
    require("starlette")
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Route as StarletteRoute

    server = _Server(models, options, is_stopping)

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        server.start()
        try:
            yield
        finally:
            server.close()

    # The routes of interfaces first, since routes are tried in turn.
    endpoints = {route: _Endpoint(server.counted(*route)) for route in server.routes}
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

    async def under_prefixes(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            # Not uvicorn's root_path, which assumes that the proxy has removed the prefix.
            root = scope.get("root_path", "") + options.root_path
            prefix, model = server.model_of_path(scope["path"].removeprefix(root))
            scope["root_path"] = root + prefix
            if model is not None:
                scope[_MODEL] = model
            if scope["path"] == scope["root_path"] != "":
                scope["path"] += "/"
            endpoint = endpoints.get((scope["method"], scope["path"].removeprefix(scope["root_path"])))
            if endpoint is not None and not middleware:
                # Starlette's layers, and its search by regular expressions, cost as much as tokenizing a short text.
                await endpoint(scope, receive, send)
                return
        await served(scope, receive, send)

    return under_prefixes


class _Endpoint:
    """A handler as an ASGI application, so that Starlette does not handle exceptions: the handler does."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class _Server:
    """The models, and the routes of their interfaces.

    Attributes:
        routes: method and path -> the models that have the route, each with its own.
    """

    def __init__(self, models: Sequence[LoadedModel], options: ServeOptions, is_stopping: Callable[[], bool]) -> None:
        self._options = options
        self._is_stopping, self._stopping_since = is_stopping, math.inf
        self._requests = RunningRequests(options.timeout, self._reason_to_stop)
        self.metrics = Metrics()
        # Equal shares, since each model may get all requests.
        max_queue_tokens = max(1, options.queue_tokens() // len(models))
        self._models = [
            RunningModel(
                each,
                options,
                max_queue_tokens=max_queue_tokens,
                on_batch=functools.partial(self.metrics.batch, each.name),
            )
            for each in models
        ]
        for model in self._models:
            self.metrics.watch(model.name, waiting=model.waiting, padding=model.padding)
        check_names(models)
        self._by_name = _by_name(models, self._models)
        self.routes: dict[tuple[str, str], dict[RunningModel, Route]] = {}
        of_server = [
            Route("/health", None, self._get_health, is_open=True, is_of_server=True),
            Route("/ready", None, self._get_ready, is_open=True, is_of_server=True),
            Route("/metrics", None, self._get_metrics, is_of_server=True),
            Route("/openapi.json", None, self._get_description, is_of_server=True),
        ]
        for model in self._models:
            of_interfaces = [route for interface in model.interfaces for route in interface.routes()]
            for route in (*of_server, *of_interfaces):
                method = "GET" if route.body is None else "POST"
                self.routes.setdefault((method, route.path), {})[model] = route

    def start(self) -> None:
        """Run a text in each session, for which readiness waits; a BackendError if a model can answer no request."""
        reason = self._unavailable_reason(self._models)
        if reason:
            raise BackendError(
                reason, hint="Load the bundle in each process that serves; leave out gunicorn --preload."
            )
        for model in self._models:
            model.health.probe()

    def close(self) -> None:
        """End the queues."""
        self._requests.close()
        for model in self._models:
            model.close()

    def model_of_path(self, path: str) -> tuple[str, RunningModel | None]:
        """The prefix of a path that names a model, and the model: the only one, or the one that is named.

        Names may have slashes, and one may begin with another: the longest counts.
        """
        only = self._models[0] if len(self._models) == 1 else None
        if path.startswith(_MODELS):
            rest = path.removeprefix(_MODELS)
            names = [name for name in self._by_name if rest == name or rest.startswith(f"{name}/")]
            if names:
                name = max(names, key=len)
                return f"{_MODELS}{name}", self._by_name[name]
        return "", only

    def models_of(self, request: Request) -> list[RunningModel]:
        """The model that the path names, or all."""
        model = request.scope.get(_MODEL)
        return self._models if model is None else [model]

    def counted(self, method: str, path: str) -> Handler:
        """The route's response, counted, or its error as OpenAI writes it, unless the interface writes others."""
        routes = self.routes[method, path]
        route = next(iter(routes.values()))
        error_of = functools.partial(self._error, route.error)

        async def checked(request: Request) -> Response:
            began, status = time.monotonic(), _CLIENT_CLOSED_REQUEST
            try:
                if not route.is_open:
                    self._check_key(request)
                response = await self._requests.answered(request, functools.partial(self._response, routes))
                status = response.status_code
                return response
            except _RequestError as error:
                status = error.status
                return error_of(error.status, str(error), retry_after=error.retry_after)
            except (OverloadedError, InputError) as error:
                status = next(code for kind, code in _STATUS_OF_ERROR.items() if isinstance(error, kind))
                retry_after = error.retry_after if isinstance(error, OverloadedError) else None
                code = "model_not_found" if isinstance(error, ModelNotFoundError) else None
                return error_of(status, request_message(error), retry_after=retry_after, code=code)
            except NonFiniteOutputError as error:
                # The texts or the device cause it: the server tries whether other texts get answers.
                status = 422
                logger.error("%s: %s", path, error)
                self._doubt(request)
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
                self._doubt(request)
                return error_of(status, "The server failed; its log has the reason.")
            finally:
                model = request.scope.get(_MODEL)
                name = "" if model is None else model.name
                self.metrics.request(name, path, status, time.monotonic() - began)

        return checked

    async def unknown(self, request: Request, error: Any) -> Response:
        """The response to an unknown path, and to a method that a path does not have."""
        root, model = self._options.root_path, request.scope.get(_MODEL)
        path = request.scope["path"].removeprefix(root)
        if model is None and path.startswith(_MODELS) and self._has_key(request):
            return self._error(None, 404, str(self._no_such_model(path.removeprefix(_MODELS))), code="model_not_found")
        listed = [(method, path) for (method, path), of_models in self.routes.items() if model in (None, *of_models)]
        paths = ", ".join(f"{method} {root}{path}" for method, path in listed)
        response = self._error(
            None, error.status_code, f"There is no such route for the bundle's task; there are {paths}."
        )
        response.headers.update(error.headers or {})
        return response

    def _doubt(self, request: Request) -> None:
        """Run a text of one token in the sessions that a request may have found broken."""
        for model in self.models_of(request):
            model.health.doubt()

    async def _response(self, routes: Mapping[RunningModel, Route], request: Request) -> Response:
        from starlette.responses import Response

        models = [model.served for model in self.models_of(request)]
        route = next(iter(routes.values()))
        if route.body is None:
            model = self._chosen(routes, request, ())
            serve_request = _ServeRequest(self, request, model, models)
            answer = await routes[model].handler(serve_request, None)
        elif route.lines is not None and _has_json_lines(request):
            lines = await self._read(request, _read_lines)
            model = self._chosen(routes, request, lines)
            serve_request = _ServeRequest(self, request, model, models)
            of_lines = routes[model].lines
            assert of_lines is not None, "a path has JSON lines for all models, or for none"
            answers = cast(list[object], await of_lines(serve_request, lines))
            content = b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)
            answer = Response(content, media_type=_JSON_LINES[0])
        else:
            values = await self._read(request, _values)
            model = self._chosen(routes, request, [values])
            serve_request = _ServeRequest(self, request, model, models)
            answer = await routes[model].handler(serve_request, await self._body(request, values, routes[model].body))
        response = answer if isinstance(answer, Response) else self._json(answer)
        if serve_request.truncated:
            self.metrics.truncated(model.name, route.path, len(serve_request.truncated))
            response.headers[_TRUNCATED] = _ranges(serve_request.truncated)
        return response

    def _chosen(
        self, routes: Mapping[RunningModel, Route], request: Request, bodies: Sequence[Mapping[str, Any]]
    ) -> RunningModel:
        """The model that the path names, or the bodies, or the only one that has the route."""
        model: RunningModel | None = request.scope.get(_MODEL)
        route = next(iter(routes.values()))
        if model is None and route.is_of_server:
            return next(iter(routes))
        if model is None:
            name = self._name(request, bodies)
            if name is not None and name not in self._by_name:
                raise self._no_such_model(name)
            if name is None and len(routes) > 1:
                names, by_key = [each.name for each in routes], 'Send "model" with one of these names, or use'
                raise InputError(
                    f"Several models answer {request.method} {route.path}: {', '.join(names)}.",
                    hint=f"{by_key if bodies else 'Use'} the path {_MODELS}{names[0]}{route.path}.",
                )
            model = next(iter(routes)) if name is None else self._by_name[name]
            request.scope[_MODEL] = model
        if model not in routes:
            others = ", ".join(each.name for each in routes)
            raise ModelNotFoundError(
                f"The model {model.name} does not answer {request.method} {route.path}; {others} does."
            )
        return model

    @staticmethod
    def _name(request: Request, bodies: Sequence[Mapping[str, Any]]) -> str | None:
        """Name of the requested model, from the path or the body; None for a request without a model."""
        if "model" in request.path_params:
            name: str = request.path_params["model"]
            return name
        names = [body.get("model") for body in bodies]
        if any(not isinstance(each, str | None) for each in names):
            raise InputError("model is not a text.", hint='Send the name of a model: {"model": "..."}.')
        if len(set(names)) > 1:
            raise InputError("The lines name several models.", hint="Send a request for each model.")
        return names[0] if names else None

    def _no_such_model(self, name: str) -> ModelNotFoundError:
        names = ", ".join(model.name for model in self._models)
        return ModelNotFoundError(f"There is no model {name!r:.100}. The server has {names}.")

    async def _get_health(self, request: ServeRequest, body: None) -> object:
        request.check_alive()
        return {"status": "ok"}

    async def _get_ready(self, request: ServeRequest, body: None) -> object:
        await request.check_ready()
        return {"status": "ok"}

    def check_alive(self, models: Sequence[RunningModel]) -> None:
        """See `ServeRequest.check_alive`."""
        self.check_available(models)
        failed = [model for model in models if model.health.failure]
        for model in failed:
            # Run again, since it may work by now.
            model.health.probe()
        if failed:
            raise _RequestError(503, self._reasons({model: model.health.failure for model in failed}))

    async def check_ready(self, models: Sequence[RunningModel]) -> None:
        """See `ServeRequest.check_ready`: whether a text was answered since the start, and since the last failure."""
        self.check_available(models)
        if doubted := [model for model in models if not model.health.has_worked]:
            # The text runs on if this client disconnects, for the next client that asks.
            await asyncio.wait([model.health.probe() for model in doubted], timeout=_READY_SECONDS)
        reasons = {
            model: model.health.failure or "A text of one token is running."
            for model in doubted
            if not model.health.has_worked
        }
        if reasons:
            raise _RequestError(503, self._reasons(reasons))

    def check_available(self, models: Sequence[RunningModel]) -> None:
        """Refuse a request if one of the models can answer none."""
        reason = self._unavailable_reason(models)
        if reason:
            raise _RequestError(503, reason)

    def _unavailable_reason(self, models: Sequence[RunningModel]) -> str:
        """Why models can answer no request; empty if all can."""
        return self._reasons({model: reason for model in models if (reason := model.unavailable_reason())})

    def _reasons(self, reasons: Mapping[RunningModel, str]) -> str:
        """Reasons, with the names of their models where there are several."""
        if len(self._models) == 1:
            return "".join(reasons.values())
        return " ".join(f"{model.name}: {reason}" for model, reason in reasons.items())

    async def _get_description(self, request: ServeRequest, body: None) -> object:
        """The routes of the models that a request may choose from."""
        names = {name for model in request.models for name in model.names}
        is_prefixed = len(request.models) < len(self._models)
        of_models = {
            key: [route for model, route in routes.items() if model.served in request.models]
            for key, routes in self.routes.items()
        }
        prefix = f"{_MODELS}{request.models[0].name}" if is_prefixed else ""
        return description(
            {key: routes for key, routes in of_models.items() if routes},
            models=[name for name in self._by_name if name in names],
            chooses=len(request.models) > 1,
            prefix=self._options.root_path + prefix,
            has_key=self._options.api_key is not None,
            json_lines=_JSON_LINES[0],
        )

    async def _get_metrics(self, request: ServeRequest, body: None) -> Response:
        from starlette.responses import Response

        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def check_number(self, texts: int) -> None:
        """See `ServeRequest.check_number`."""
        if not 1 <= texts <= self._options.max_texts:
            raise too_many_texts(texts, self._options.max_texts)

    async def _reason_to_stop(self, request: Request) -> Exception | None:
        """The error of a request whose client has disconnected, or that this process can no longer answer."""
        model = request.scope.get(_MODEL)
        if model is not None and (reason := self._unavailable_reason([model])):
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

    async def _read(self, request: Request, read: Callable[[bytearray, ServeOptions, int], Read]) -> Read:
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
        max_ids = max(self._options.max_text_characters // 4, *(each.served.tokenizer.max_len for each in self._models))
        request.scope[_IS_LARGE] = len(content) > LARGE_BYTES
        if not request.scope[_IS_LARGE]:
            return read(content, self._options, max_ids)
        return await asyncio.to_thread(read, content, self._options, max_ids)

    async def _body(self, request: Request, values: dict[str, Any], kind: Any) -> Any:
        if kind is dict:
            return values
        if not request.scope[_IS_LARGE]:
            return self.body(values, kind)
        return await asyncio.to_thread(self.body, values, kind)

    def body(self, values: Mapping[str, Any], kind: type[Content]) -> Content:
        """See `ServeRequest.body`."""
        body, truncate = body_of(values, kind), self._options.truncate
        if isinstance(body, RequestBody) and truncate is not None and not body.says_overflow:
            body.truncate = truncate
        return body

    def _check_key(self, request: Request) -> None:
        if not self._has_key(request):
            raise _RequestError(401, "The API key is missing or wrong: send Authorization: Bearer KEY.")

    def _has_key(self, request: Request) -> bool:
        """Whether a request has the API key, or needs none."""
        if self._options.api_key is None:
            return True
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.encode(), self._options.api_key.encode())
        return scheme.lower() == "bearer" and is_right

    def _json(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        from starlette.responses import Response

        encoded = msgspec.json.encode(content)
        return Response(encoded, status_code=status, media_type="application/json", headers=headers)

    def _error(
        self,
        error: Callable[[int, str], object] | None,
        status: int,
        message: str,
        *,
        retry_after: int | None = None,
        code: str | None = None,
    ) -> Response:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        openai = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return self._json(openai if error is None else error(status, message), status, headers)


class _ServeRequest:
    """See `ServeRequest`."""

    def __init__(self, server: _Server, request: Request, model: RunningModel, models: Sequence[ServedModel]) -> None:
        self.tokenizer, self.models = model.served.tokenizer, models
        self.check_number, self.body = server.check_number, server.body
        self.truncated = set[int]()
        self.path_parameters: Mapping[str, str] = request.path_params
        self._server, self._request, self._model = server, request, model
        self.part = functools.partial(_ServeRequest, server, request, model, models)

    def check_alive(self) -> None:
        self._server.check_alive(self._server.models_of(self._request))

    async def check_ready(self) -> None:
        await self._server.check_ready(self._server.models_of(self._request))

    async def answers(self, body: RequestBody, texts: Sequence[Text], **options: Any) -> Answers:
        self.check_number(len(texts))
        self._server.check_available([self._model])
        client = self._request.client
        answers = await self._model.answers(
            body,
            texts,
            client="" if client is None else client_of(client.host),
            within_s=seconds_left(self._request),
            **options,
        )
        self.truncated.update(answers.truncated)
        return answers


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


def _read_lines(content: bytearray, options: ServeOptions, max_ids: int) -> list[dict[str, Any]]:
    """Parse JSON lines into objects; empty lines are ignored."""
    lines = content.rstrip()
    # Counted before they are made.
    if not lines or (count := lines.count(b"\n") + 1) > options.max_texts:
        raise too_many_texts(count if lines else 0, options.max_texts)
    return [_values(line, options, max_ids) for line in lines.split(b"\n") if line.strip()]


def _disconnected() -> _RequestError:
    return _RequestError(_CLIENT_CLOSED_REQUEST, "The client has disconnected.")


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


def _by_name(models: Sequence[LoadedModel], running: Sequence[RunningModel]) -> dict[str, RunningModel]:
    """Names -> models: the given names, and the names in manifests that one model alone has."""
    by_name: dict[str, RunningModel] = {}
    for model, each in zip(models, running, strict=True):
        by_name |= dict.fromkeys(model.names or [model.name], each)
    in_manifests = Counter(model.bundle.manifest.name for model in models)
    for model, each in zip(models, running, strict=True):
        name = model.bundle.manifest.name
        if in_manifests[name] == 1:
            by_name.setdefault(name, each)
    return by_name
