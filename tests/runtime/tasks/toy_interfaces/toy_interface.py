"""``POST /loudest``: the route of the toy task."""

from __future__ import annotations

from collections.abc import Sequence

from hdruntime.serve.interface import Interface, Route, ServeRequest
from hdruntime.serve.interfaces.tei import TextsBody
from hdruntime.tasks.task import TextTask


class ToyInterface(Interface):
    """The loudest token of each text."""

    @classmethod
    def answers_task(cls, task: TextTask) -> bool:
        """The toy alone."""
        return type(task).__name__ == "LoudestToken"

    def routes(self) -> Sequence[Route]:
        """``POST /loudest``."""
        return [Route("/loudest", TextsBody, self._loudest)] if self.answers_task(self.model.task) else []

    async def _loudest(self, request: ServeRequest, body: TextsBody) -> object:
        answers = await request.answers(body, await body.texts(request))
        return [answer._asdict() for answer in answers.answers]


INTERFACE = ToyInterface
