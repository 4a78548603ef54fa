"""The route ``/``, by which hosting platforms reach a model of any task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

import msgspec

from hdruntime.errors import InputError, joined
from hdruntime.serve.interface import Route, ServedModel, ServeRequest
from hdruntime.serve.interfaces import interfaces

INPUTS = "inputs"
"""The key of texts in the bodies of text-embeddings-inference and Hugging Face's pipelines."""


class RootRoutes:
    """The routes of a model that answer at ``/``, and what they answer to bodies that other paths get.

    Args:
        model: the served model.
    """

    def __init__(self, model: ServedModel) -> None:
        self._routes = [route for interface in interfaces() for route in interface(model).roots()]

    def __bool__(self) -> bool:
        """Whether the model has such a route."""
        return bool(self._routes)

    def of(self, values: Mapping[str, Any]) -> Route:
        """The route for a body of these keys: of a reranker, the one for ranking unless the body has `inputs`; of an
        embedder, the one that compares texts if `inputs` is an object."""
        with_inputs = [route for route in self._routes if INPUTS in fields_of(route)]
        if isinstance(values.get(INPUTS), Mapping):
            return with_inputs[-1]
        return with_inputs[0] if INPUTS in values else self._routes[0]

    async def answer(self, request: ServeRequest, values: Mapping[str, Any]) -> object:
        route = self.of(values)
        return await route.handler(request, request.body(values, cast(type[msgspec.Struct], route.body)))

    async def answer_each(self, request: ServeRequest, bodies: Sequence[Mapping[str, Any]], name: str) -> list[object]:
        """The answer of ``/`` to each of several bodies, which share batches.

        Args:
            request: the request that brought them; its truncated inputs are numbers of bodies.
            bodies: one or more, at most as many as a request may have texts.
            name: the list in messages, such as ``instances``.
        """
        request.check_number(len(bodies))
        parts = [request.part() for _ in bodies]

        async def one(number: int) -> object:
            with_number = f"{name}[{number}]"
            try:
                if not isinstance(bodies[number], Mapping):
                    raise InputError("This is no JSON object.", hint='Send an object such as {"inputs": "..."}.')
                return await self.answer(parts[number], bodies[number])
            except InputError as error:
                if type(error) is not InputError:
                    raise
                raise InputError(f"{with_number}: ", *joined(error.problem), hint=error.hint) from None

        answers = await all_or_first_error([one(number) for number in range(len(bodies))])
        request.truncated.update(number for number, part in enumerate(parts) if part.truncated)
        return answers


def fields_of(route: Route) -> Sequence[str]:
    """The keys of a root's body."""
    return cast(type[msgspec.Struct], route.body).__struct_fields__


async def all_or_first_error(awaited: Sequence[Awaitable[object]]) -> list[object]:
    """All results, in order; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(cast(Any, each)) for each in awaited]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
