"""The contract of a Vertex AI container: `instances` in, `predictions` out, at the path that Vertex AI names.

https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements. ``/vertex`` is the path of
text-embeddings-inference, and ``/v1/models/NAME:predict`` that of TensorFlow Serving and KServe's first protocol, which
have the same body.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hdruntime.errors import InputError
from hdruntime.serve.interface import Interface, Route, ServeRequest
from hdruntime.serve.interfaces import interfaces
from hdruntime.serve.request_body import WITHOUT_EFFECT, field_of
from hdruntime.serve.root_routes import INPUTS, RootRoutes, fields_of

PREDICT_ROUTE, HEALTH_ROUTE = "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"
"""Variables with the paths that Vertex AI calls."""


class InstancesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`instances` are texts, pairs of texts, or bodies of ``POST /``; `parameters` are keys of each body."""

    instances: list[Any]
    parameters: dict[str, Any] | None = None


class VertexInterface(Interface):
    """The paths that Vertex AI calls."""

    @functools.cached_property
    def _roots(self) -> RootRoutes:
        return RootRoutes(self.model)

    def routes(self) -> Sequence[Route]:
        if not self._roots:
            return []
        paths = ["/vertex", "/v1/models/{model:path}:predict"]
        routes = [Route(path, InstancesBody, self._predict) for path in paths]
        # A path that another interface has stays that interface's: raw predictions go to any route.
        others = {
            route.path
            for each in interfaces()
            if not issubclass(each, VertexInterface)
            for route in each(self.model).routes()
        }
        predict, health = os.environ.get(PREDICT_ROUTE), os.environ.get(HEALTH_ROUTE)
        if predict and predict not in (*others, *paths):
            routes.append(Route(_literal(predict), InstancesBody, self._predict))
        if health and health not in (*others, "/health", "/ready"):
            routes.append(Route(_literal(health), None, self._health, is_open=True, is_of_server=True))
        return routes

    async def _health(self, request: ServeRequest, body: None) -> object:
        await request.check_ready()
        return {"status": "ok"}

    async def _predict(self, request: ServeRequest, body: InstancesBody) -> object:
        roots, instances, parameters = self._roots, body.instances, body.parameters or {}
        if request.path_parameters:
            self.model.check_name(request)
        request.check_number(len(instances))
        if any(isinstance(each, dict) for each in instances):
            bodies = [self._with(each, parameters) if isinstance(each, dict) else each for each in instances]
            return {"predictions": await roots.answer_each(request, bodies, "instances")}
        # Vertex AI's batch jobs send a line of CSV as a list.
        inputs = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in instances]
        if not all(isinstance(each, str) or _is_pair(each) for each in inputs):
            raise InputError(
                "An instance is neither a text, nor a pair of texts, nor a JSON object.",
                hint='Send texts: {"instances": ["...", "..."]}, or bodies of POST /.',
            )
        return {"predictions": await roots.answer(request, self._with({INPUTS: inputs}, parameters))}

    def _with(self, values: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """A body with the parameters of all, which are keys of it or of its `parameters`; its own keys come first."""
        fields = fields_of(self._roots.of(values))
        inside = {
            key: value
            for key, value in parameters.items()
            if "parameters" in fields and key not in WITHOUT_EFFECT and field_of(key, fields) not in fields
        }
        outside = {key: value for key, value in parameters.items() if key not in inside} | dict(values)
        own = values.get("parameters")
        # Not of an object: its error is the route's.
        return outside | ({"parameters": inside | (own or {})} if inside and isinstance(own, dict | None) else {})


INTERFACE = VertexInterface


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _literal(path: str) -> str:
    """A variable's path; braces would be parameters of a route."""
    if not path.startswith("/") or "{" in path:
        raise InputError(
            f"{PREDICT_ROUTE} or {HEALTH_ROUTE} is {path!r}.",
            hint="Give a path that begins with a slash, such as /predict.",
        )
    return path
