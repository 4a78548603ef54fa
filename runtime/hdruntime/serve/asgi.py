"""The routes of a server, an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import HdexportError, InputError, NonFiniteOutputError, write
from hdruntime.optional import require
from hdruntime.serve.admission import OverloadedError, RequestTooLargeError
from hdruntime.serve.fair_queue import client_of
from hdruntime.serve.interface import Answers, ModelNotFoundError, Route, ServedModel, ServeRequest
from hdruntime.serve.metrics import Metrics
from hdruntime.serve.model_registry import MODEL, MODELS, ModelRegistry
from hdruntime.serve.openapi import description
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.request_body import RequestBody
from hdruntime.serve.request_keys import request_key, request_message
from hdruntime.serve.request_reader import JSON_LINES, RequestReader, has_json_lines
from hdruntime.serve.responses import (
    CLIENT_CLOSED_REQUEST,
    TRUNCATED,
    RequestError,
    error_response,
    json_response,
    number_ranges,
)
from hdruntime.serve.running import RunningRequests, seconds_left
from hdruntime.serve.running_model import LoadedModel, RunningModel
from hdruntime.session import Session
from hdruntime.tasks.task import Text

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

Handler = Callable[["Request"], Awaitable["Response"]]

_STATUS_OF_ERROR: Mapping[type[HdexportError], int] = {
    OverloadedError: 429,
    RequestTooLargeError: 413,
    ModelNotFoundError: 404,
    InputError: 400,
}
"""Statuses of errors of which a request is the cause; the first class that an error belongs to counts."""


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
        is_stopping: whether the HTTP server accepts no more requests; bodies that have not arrived are then rejected.

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
        server.models.start()
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
            expose_headers=[TRUNCATED],
        )
        middleware.append(cors)
    served = Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=errors)

    async def under_prefixes(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            # Not uvicorn's root_path, which assumes that the proxy has removed the prefix.
            root = scope.get("root_path", "") + options.root_path
            prefix, model = server.models.of_path(scope["path"].removeprefix(root))
            scope["root_path"] = root + prefix
            if model is not None:
                scope[MODEL] = model
            if scope["path"] == scope["root_path"] != "":
                scope["path"] += "/"
            endpoint = endpoints.get((scope["method"], scope["path"].removeprefix(scope["root_path"])))
            if endpoint is not None and not middleware:
                # Starlette's layers, and its search by regular expressions, cost as much as tokenizing a short text.
                await endpoint(scope, receive, send)
                return
        await served(scope, receive, send)

    return under_prefixes


_RESPONSE_BYTES = "hdexport.response_bytes"
"""The key of the size of the response, in a request's scope, as far as it is known before texts run."""


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
        models: the models, by their names.
        reader: reads the bodies of requests.
        routes: method and path -> the models that have the route, each with its own.
    """

    def __init__(self, models: Sequence[LoadedModel], options: ServeOptions, is_stopping: Callable[[], bool]) -> None:
        self._options = options
        self._requests = RunningRequests(options.timeout, self._reason_to_stop)
        self.metrics = Metrics()
        self.models = ModelRegistry(models, options, self.metrics.batch)
        for model in self.models.running:
            self.metrics.watch(model.name, waiting=model.waiting, padding=model.padding)
        max_len = max(model.served.tokenizer.max_len for model in self.models.running)
        self.reader = RequestReader(options, max_len, is_stopping)
        self.routes: dict[tuple[str, str], dict[RunningModel, Route]] = {}
        of_server = [
            Route("/health", None, self._get_health, is_open=True, is_of_server=True),
            Route("/ready", None, self._get_ready, is_open=True, is_of_server=True),
            Route("/metrics", None, self._get_metrics, is_of_server=True),
            Route("/openapi.json", None, self._get_description, is_of_server=True),
        ]
        for model in self.models.running:
            of_interfaces = [route for interface in model.interfaces for route in interface.routes()]
            for route in (*of_server, *of_interfaces):
                method = "GET" if route.body is None else "POST"
                self.routes.setdefault((method, route.path), {})[model] = route

    def close(self) -> None:
        """End the queues."""
        self._requests.close()
        self.models.close()

    def counted(self, method: str, path: str) -> Handler:
        """The route's response, counted, or its error as OpenAI writes it, unless the interface writes others."""
        routes = self.routes[method, path]
        route = next(iter(routes.values()))
        error_of = functools.partial(error_response, route.error)

        async def checked(request: Request) -> Response:
            began, status = time.monotonic(), CLIENT_CLOSED_REQUEST
            try:
                if not route.is_open:
                    self._check_key(request)
                response = await self._requests.answered(request, functools.partial(self._response, routes))
                status = response.status_code
                return response
            except RequestError as error:
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
                model = request.scope.get(MODEL)
                name = "" if model is None else model.name
                self.metrics.request(name, route.shown_path, status, time.monotonic() - began)

        return checked

    async def unknown(self, request: Request, error: Any) -> Response:
        """The response to an unknown path, and to a method that a path does not have."""
        root, model = self._options.root_path, request.scope.get(MODEL)
        path = request.scope["path"].removeprefix(root)
        if model is None and path.startswith(MODELS) and self._has_key(request):
            return error_response(None, 404, str(self.models.not_found(f"of the path {path}")), code="model_not_found")
        headers = error.headers or {}
        if error.status_code == 405:
            message = f"The request is {request.method} {path}; the route takes {headers['Allow']}."
        else:
            models = self.models.of_request(request)
            tasks = " and ".join(dict.fromkeys(str(each.served.task.manifest.task) for each in models))
            routes = [
                (method, next(iter(of_models.values())))
                for (method, _), of_models in self.routes.items()
                if not of_models.keys().isdisjoint(models)
            ]
            paths = ", ".join(f"{method} {root}{route.shown_path}" for method, route in routes)
            message = f"There is no route {request.method} {path} for models of {tasks}. There are {paths}."
        response = error_response(None, error.status_code, message)
        response.headers.update(headers)
        return response

    def _doubt(self, request: Request) -> None:
        """Run a text of one token in the sessions that a request may have found broken."""
        for model in self.models.of_request(request):
            model.health.doubt()

    async def _response(self, routes: Mapping[RunningModel, Route], request: Request) -> Response:
        from starlette.responses import Response

        models = [model.served for model in self.models.of_request(request)]
        route = next(iter(routes.values()))
        if route.body is None:
            model = self.models.chosen(routes, request, ())
            serve_request = _ServeRequest(self, request, model, models)
            answer = await routes[model].handler(serve_request, None)
        elif route.lines is not None and has_json_lines(request):
            lines = await self.reader.lines(request)
            model = self.models.chosen(routes, request, lines)
            serve_request = _ServeRequest(self, request, model, models)
            of_lines = routes[model].lines
            assert of_lines is not None, "a path has JSON lines for all models, or for none"
            answers = cast(list[object], await of_lines(serve_request, lines))
            content = b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)
            answer = Response(content, media_type=JSON_LINES[0])
        else:
            values = await self.reader.values(request)
            model = self.models.chosen(routes, request, [values])
            serve_request = _ServeRequest(self, request, model, models)
            answer = await routes[model].handler(
                serve_request, await self.reader.body_of_request(request, values, routes[model].body)
            )
        response = answer if isinstance(answer, Response) else json_response(answer)
        if serve_request.truncated:
            self.metrics.truncated(model.name, route.shown_path, len(serve_request.truncated))
            response.headers[TRUNCATED] = number_ranges(serve_request.truncated)
        return response

    async def _get_health(self, request: ServeRequest, body: None) -> object:
        request.check_alive()
        return {"status": "ok"}

    async def _get_ready(self, request: ServeRequest, body: None) -> object:
        await request.check_ready()
        return {"status": "ok"}

    async def _get_description(self, request: ServeRequest, body: None) -> object:
        """The routes of the models that a request may choose from."""
        names = {name for model in request.models for name in model.names}
        is_prefixed = len(request.models) < len(self.models.running)
        of_models = {
            key: [route for model, route in routes.items() if model.served in request.models]
            for key, routes in self.routes.items()
        }
        prefix = f"{MODELS}{request.models[0].name}" if is_prefixed else ""
        return description(
            {key: routes for key, routes in of_models.items() if routes},
            models=[name for name in self.models.names if name in names],
            chooses=len(request.models) > 1,
            prefix=self._options.root_path + prefix,
            has_key=self._options.api_key is not None,
            json_lines=JSON_LINES[0],
        )

    async def _get_metrics(self, request: ServeRequest, body: None) -> Response:
        from starlette.responses import Response

        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _reason_to_stop(self, request: Request) -> Exception | None:
        """The error of a request whose client has disconnected, or that this process can no longer answer."""
        model = request.scope.get(MODEL)
        if model is not None and (reason := self.models.unavailable_reason([model])):
            return RequestError(503, reason)
        return await self.reader.reason_to_stop(request)

    def _check_key(self, request: Request) -> None:
        if not self._has_key(request):
            raise RequestError(401, "The API key is missing or wrong: send Authorization: Bearer KEY.")

    def _has_key(self, request: Request) -> bool:
        """Whether a request has the API key, or needs none."""
        if self._options.api_key is None:
            return True
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.encode(), self._options.api_key.encode())
        return scheme.lower() == "bearer" and is_right


class _ServeRequest:
    """See `ServeRequest`."""

    def __init__(self, server: _Server, request: Request, model: RunningModel, models: Sequence[ServedModel]) -> None:
        self.tokenizer, self.models = model.served.tokenizer, models
        self.check_number, self.body = server.reader.check_number, server.reader.body
        self.truncated = set[int]()
        self.path_parameters: Mapping[str, str] = request.path_params
        self._models, self._request, self._model = server.models, request, model
        self.part = functools.partial(_ServeRequest, server, request, model, models)

    def check_alive(self) -> None:
        self._models.check_alive(self._models.of_request(self._request))

    async def check_ready(self) -> None:
        await self._models.check_ready(self._models.of_request(self._request))

    def add_response_bytes(self, size: int) -> int:
        # In the scope, which the parts of a request share.
        total: int = self._request.scope.get(_RESPONSE_BYTES, 0) + size
        self._request.scope[_RESPONSE_BYTES] = total
        return total

    async def answers(self, body: RequestBody, texts: Sequence[Text], **options: Any) -> Answers:
        self.check_number(len(texts))
        self._models.check_available([self._model])
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
