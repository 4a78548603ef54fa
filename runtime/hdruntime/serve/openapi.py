"""The OpenAPI description of a server's routes, https://spec.openapis.org/oas/v3.1.0.

Bodies of requests are described by their msgspec types. Responses are JSON, as the APIs' documentation describes it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hdruntime.serve.interface import Route
from hdruntime.serve.request_body import OTHER_NAMES, WITHOUT_EFFECT

Schema = dict[str, Any]
_Body = type[msgspec.Struct]

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_TEMPLATE = "#/components/schemas/{name}"
_ERROR = "Error"


def description(
    routes: Mapping[tuple[str, str], Sequence[Route]],
    *,
    models: Sequence[str],
    chooses: bool,
    prefix: str,
    has_key: bool,
    json_lines: str,
) -> dict[str, Any]:
    """The description, as JSON has it.

    Args:
        routes: method and path -> the route of each model that has it.
        models: names by which requests may choose a model.
        chooses: whether a request has to name a model; one model alone takes any name.
        prefix: what precedes every path.
        has_key: whether requests need the API key.
        json_lines: content type of JSON lines.
    """
    from hdruntime import __version__

    names: Schema = {"enum": [*models]} if chooses else {"type": "string"}
    references, schemas = _schemas(routes.values(), names)
    paths: dict[str, Any] = {}
    for (method, path), of_models in routes.items():
        route = of_models[0]
        parameters = _PARAMETER.findall(path)
        has_to_choose = chooses and len(of_models) > 1 and not route.is_of_server and "model" not in parameters
        if has_to_choose and route.body is None:
            # No request can; each model has the route below its own path.
            continue
        operation: dict[str, Any] = {
            "operationId": "_".join(re.findall(r"\w+", f"{method.lower()} {path}")),
            "responses": _responses(route),
        }
        if parameters:
            operation["parameters"] = [_parameter(name, names) for name in parameters]
        if route.body is not None:
            schema = _any_of([_reference(route, references) for route in of_models])
            if has_to_choose:
                schema = {"allOf": [schema, {"required": ["model"], "properties": {"model": names}}]}
            content: Schema = {"application/json": {"schema": schema}}
            if route.lines is not None:
                content[json_lines] = {"schema": {"type": "string", "description": "a JSON object on each line"}}
            operation["requestBody"] = {"required": True, "content": content}
        if has_key and not route.is_open:
            operation["security"] = [{"key": []}]
        paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})[method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas}
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hdexport serve", "version": __version__},
        "servers": [{"url": prefix or "/"}],
        "paths": paths,
        "components": components,
    }


def _parameter(name: str, models: Schema) -> Schema:
    schema = models if name == "model" else {"type": "string"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _responses(route: Route) -> Schema:
    kind = "text/plain" if route.path == "/metrics" else "application/json"
    error = {"$ref": _TEMPLATE.format(name=_ERROR)} if route.error is None else {"type": "object"}
    return {
        "200": {"description": "The answer", "content": {kind: {}}},
        "default": {"description": "An error", "content": {"application/json": {"schema": error}}},
    }


def _reference(route: Route, references: Mapping[_Body, Schema]) -> Schema:
    body = _struct(route)
    return {"type": "object"} if body is None else references[body]


def _any_of(schemas: Sequence[Schema]) -> Schema:
    different = [schema for number, schema in enumerate(schemas) if schema not in schemas[:number]]
    return different[0] if len(different) == 1 else {"anyOf": different}


def _schemas(routes: Iterable[Sequence[Route]], names: Schema) -> tuple[dict[_Body, Schema], dict[str, Schema]]:
    """The schema of each body, and the schemas to which these refer, with all keys that a request may have."""
    bodies = list(dict.fromkeys(body for of_models in routes for body in map(_struct, of_models) if body is not None))
    references, found = msgspec.json.schema_components(bodies, ref_template=_TEMPLATE)
    for body, reference in zip(bodies, references, strict=True):
        schema = found[reference["$ref"].rpartition("/")[2]]
        fields, properties = body.__struct_fields__, schema["properties"]
        for key in set(properties) - set(schema.get("required", ())):
            # As if it were absent.
            properties[key] = {"anyOf": [properties[key], {"type": "null"}]}
        for other, field in OTHER_NAMES.items():
            if field in fields and other not in fields:
                properties[other] = copy.deepcopy(properties[field]) | {"description": f"another name of {field}"}
        for key, values in WITHOUT_EFFECT.items():
            if key not in fields:
                properties[key] = {} if values is None else {"enum": [*values, None]}
        if "model" not in fields and "enum" in names:
            properties["model"] = {"enum": [*names["enum"], None]}
    message = {"type": "object", "properties": {"message": {"type": "string"}}}
    found[_ERROR] = {"type": "object", "properties": {"error": message}}
    return dict(zip(bodies, references, strict=True)), found


def _struct(route: Route) -> _Body | None:
    body = route.body
    return body if body is not None and issubclass(body, msgspec.Struct) else None
