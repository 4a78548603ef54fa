"""Whether the sessions of a model still answer: they run a text of one token when that is in doubt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from hdruntime.errors import BackendError
from hdruntime.session import Session
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Pairs, Text, TextTask
from hdruntime.tasks.text_inference import TextInference
from hdruntime.text.encoding import Overflow

logger = logging.getLogger(__name__)


class SessionHealth:
    """The result of the last text that shows whether the sessions of a model work.

    Attributes:
        has_worked: whether a text has run since the start, and since the last failure.
        failure: why the last text of one token failed; empty if it ran.
    """

    def __init__(self, sessions: Sequence[Session], task: TextTask) -> None:
        self.has_worked, self.failure = False, ""
        self._sessions, self._task = sessions, task
        self._probing: asyncio.Task[None] | None = None

    def doubt(self) -> None:
        """Run a text of one token, since a request has failed."""
        self.has_worked = False
        self.probe()

    def probe(self) -> asyncio.Task[None]:
        """Run a text of one token beside the queue, which may be long; one such text at a time."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._run())
        return self._probing

    async def _run(self) -> None:
        try:
            for session in self._sessions:
                await asyncio.to_thread(self._run_text, session)
        except Exception:
            logger.error("a text of one token failed", exc_info=True)
            self.has_worked, self.failure = False, "A text of one token fails; the server's log has the reason."
        else:
            self.has_worked, self.failure = True, ""

    def _run_text(self, session: Session) -> None:
        sample = session.tokenizer.sample
        text = Text(text=sample, text_pair=sample if self._task.pairs is Pairs.REQUIRED else None)
        inference = TextInference(session, self._task, EncodeOptions.of(overflow=Overflow.TRUNCATE))
        (item,) = inference.encode([text])
        inference.run([item])
        if isinstance(item.error, BackendError):
            raise item.error
