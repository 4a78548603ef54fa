"""The models of a server: which of them a request means, and whether they can answer."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hdruntime.errors import BackendError, InputError
from hdruntime.serve.interface import ModelNotFoundError, Route
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.responses import RequestError
from hdruntime.serve.running_model import LoadedModel, RunningModel

if TYPE_CHECKING:
    from starlette.requests import Request

MODELS = "/models/"
"""Prefix of the routes of one model: ``/models/NAME/embed``."""

MODEL = "hdexport.model"
"""The key of the model, in a request's scope, that the path's prefix or the request has chosen."""

_READY_SECONDS = 1.0
"""How long readiness waits for a text of one token: SageMaker waits two seconds for an answer, and Kubernetes one."""


class ModelRegistry:
    """The models of a server, each with its queue, by their names.

    Args:
        models: one model, which every request means, or several with different names.
        options: the server's options.
        on_batch: called with a model's name, and the texts and the tokens of each of its batches.

    Attributes:
        running: the models, in order.
    """

    def __init__(
        self, models: Sequence[LoadedModel], options: ServeOptions, on_batch: Callable[[str, int, int], None]
    ) -> None:
        check_names(models)
        # Equal shares, since each model may get all requests.
        max_queue_tokens = max(1, options.queue_tokens() // len(models))
        self.running = [
            RunningModel(
                each,
                options,
                max_queue_tokens=max_queue_tokens,
                on_batch=functools.partial(on_batch, each.name),
            )
            for each in models
        ]
        self._by_name = _by_name(models, self.running)

    @property
    def names(self) -> Sequence[str]:
        """All names by which requests choose models."""
        return [*self._by_name]

    def start(self) -> None:
        """Run a text in each session, for which readiness waits; a BackendError if a model can answer no request."""
        reason = self.unavailable_reason(self.running)
        if reason:
            raise BackendError(
                reason, hint="Load the bundle in each process that serves; leave out gunicorn --preload."
            )
        for model in self.running:
            model.health.probe()

    def close(self) -> None:
        """End the queues."""
        for model in self.running:
            model.close()

    def of_path(self, path: str) -> tuple[str, RunningModel | None]:
        """The prefix of a path that names a model, and the model: the only one, or the one that is named.

        Names may have slashes, and one may begin with another: the longest counts.
        """
        only = self.running[0] if len(self.running) == 1 else None
        if path.startswith(MODELS):
            rest = path.removeprefix(MODELS)
            names = [name for name in self._by_name if rest == name or rest.startswith(f"{name}/")]
            if names:
                name = max(names, key=len)
                return f"{MODELS}{name}", self._by_name[name]
        return "", only

    def of_request(self, request: Request) -> list[RunningModel]:
        """The model that the path names, or all."""
        model = request.scope.get(MODEL)
        return self.running if model is None else [model]

    def chosen(
        self, routes: Mapping[RunningModel, Route], request: Request, bodies: Sequence[Mapping[str, Any]]
    ) -> RunningModel:
        """The model that the path names, or the bodies, or the only one that has the route."""
        model: RunningModel | None = request.scope.get(MODEL)
        route = next(iter(routes.values()))
        if model is None and route.is_of_server:
            return next(iter(routes))
        if model is None:
            name = _requested_name(request, bodies)
            if name is not None and name not in self._by_name:
                raise self.not_found(repr(name))
            if name is None and len(routes) > 1:
                names, by_key = [each.name for each in routes], 'Send "model" with one of these names, or use'
                raise InputError(
                    f"Several models answer {request.method} {route.path}: {', '.join(names)}.",
                    hint=f"{by_key if bodies else 'Use'} the path {MODELS}{names[0]}{route.path}.",
                )
            model = next(iter(routes)) if name is None else self._by_name[name]
            request.scope[MODEL] = model
        if model not in routes:
            others = ", ".join(each.name for each in routes)
            raise ModelNotFoundError(
                f"The model {model.name} does not answer {request.method} {route.path}; {others} does."
            )
        return model

    def not_found(self, which: str) -> ModelNotFoundError:
        """The error of a request for a model that the server does not have: `which` is its name, or says its path."""
        names = ", ".join(model.name for model in self.running)
        return ModelNotFoundError(f"There is no model {which:.100}. The server has {names}.")

    def check_alive(self, models: Sequence[RunningModel]) -> None:
        """See `ServeRequest.check_alive`."""
        self.check_available(models)
        failed = [model for model in models if model.health.failure]
        for model in failed:
            # Run again, since it may work by now.
            model.health.probe()
        if failed:
            raise RequestError(503, self._reasons({model: model.health.failure for model in failed}))

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
            raise RequestError(503, self._reasons(reasons))

    def check_available(self, models: Sequence[RunningModel]) -> None:
        """Reject a request if one of the models can answer none."""
        reason = self.unavailable_reason(models)
        if reason:
            raise RequestError(503, reason)

    def unavailable_reason(self, models: Sequence[RunningModel]) -> str:
        """Why models can answer no request; empty if all can."""
        return self._reasons({model: reason for model in models if (reason := model.unavailable_reason())})

    def _reasons(self, reasons: Mapping[RunningModel, str]) -> str:
        """Reasons, with the names of their models where there are several."""
        if len(self.running) == 1:
            return "".join(reasons.values())
        return " ".join(f"{model.name}: {reason}" for model, reason in reasons.items())


def check_names(models: Sequence[LoadedModel]) -> None:
    """Raise an InputError if two models share a name."""
    named = Counter(name for model in models for name in model.names or [model.name])
    for name, number in named.items():
        if number > 1:
            raise InputError(f"Two models have the name {name}.", hint="Give one of them another name.")


def _requested_name(request: Request, bodies: Sequence[Mapping[str, Any]]) -> str | None:
    """Name of the requested model, from the path or the body; None for a request without a model."""
    if "model" in request.path_params:
        return request.path_params["model"]
    names = [body.get("model") for body in bodies]
    if any(not isinstance(each, str | None) for each in names):
        raise InputError("model is not a text.", hint='Send the name of a model: {"model": "..."}.')
    if len(set(names)) > 1:
        raise InputError("The lines name several models.", hint="Send a request for each model.")
    return names[0] if names else None


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
