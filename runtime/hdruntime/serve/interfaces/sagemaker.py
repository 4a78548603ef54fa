"""The contract of a SageMaker container: ``GET /ping``, and ``POST /invocations`` with the bodies of ``POST /``.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html, and for batch transform
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-batch-code.html
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hdruntime.serve.interface import Interface, Route, ServeRequest
from hdruntime.serve.root_routes import RootRoutes

_TRANSFORM = {"MaxConcurrentTransforms": 4, "BatchStrategy": "MULTI_RECORD", "MaxPayloadInMB": 6}
"""How batch transform calls the server where a job does not say it: JSON lines, of SageMaker's own 6 MB."""


class SageMakerInterface(Interface):
    """The paths that SageMaker calls."""

    @functools.cached_property
    def _roots(self) -> RootRoutes:
        return RootRoutes(self.model)

    def routes(self) -> Sequence[Route]:
        ping = Route("/ping", None, self._ping, is_open=True, is_of_server=True)
        if not self._roots:
            return [ping]
        return [
            ping,
            Route("/execution-parameters", None, self._execution_parameters, is_open=True, is_of_server=True),
            Route("/invocations", dict, self._roots.answer, lines=self._lines),
        ]

    async def _ping(self, request: ServeRequest, body: None) -> object:
        await request.check_ready()
        return {"status": "ok"}

    async def _execution_parameters(self, request: ServeRequest, body: None) -> object:
        return _TRANSFORM

    async def _lines(self, request: ServeRequest, lines: Sequence[Mapping[str, Any]]) -> object:
        return await self._roots.answer_each(request, lines, "line")


INTERFACE = SageMakerInterface
