"""Rows of a batch job, run a window at a time; bad rows are told from a broken session."""

from __future__ import annotations

__all__ = ["Item", "WindowRunner"]

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hdruntime.batching import pack_by_tokens
from hdruntime.errors import BackendError, InputError, NonFiniteOutputError
from hdruntime.manifest import Manifest
from hdruntime.results import TaskResults
from hdruntime.rows import Row
from hdruntime.session import Session
from hdruntime.tokenization import Encoding, Overflow

logger = logging.getLogger(__name__)

_WINDOW_ROWS = 4096
"""Most rows looked at together, to be sorted by length."""

_WINDOW_BATCHES = 8
"""A window ends at this many batches' tokens, too: enough for full batches of rows of about one length."""

_CHUNK_ROWS = 64
"""Rows tokenised together."""

_CHUNK_CHARACTERS = 2**20
"""A chunk ends here, too; the window's bound in tokens is only known after tokenising."""

_OUTPUT_BYTES = 128 * 2**20
"""Outputs held at a time. For fill-mask that is few tokens: each has a logit for the whole vocabulary."""


@dataclass(kw_only=True)
class Item:
    """A row on its way.

    Attributes:
        row: as it was read.
        encoding: its tokens, unless it could not be read or tokenised.
        values: the task's columns, once it has run.
        error: why there are no values, if it failed.
    """

    row: Row
    encoding: Encoding | None = None
    values: dict[str, object] | None = None
    error: str | None = None


class WindowRunner:
    """Runs rows through a session, and remembers whether the session has ever worked.

    Args:
        session: what runs them.
        task: what is read from the session's outputs.
        max_batch_tokens: most tokens of a batch, padding included; fewer where outputs would fill the memory.
            None: what suits the session's backend.
        overflow: whether a row of too many tokens fails or is cut.
    """

    def __init__(
        self, session: Session, task: TaskResults, *, max_batch_tokens: int | None, overflow: Overflow
    ) -> None:
        self._session = session
        self._task = task
        self._overflow = overflow
        batch_tokens = session.batch_tokens if max_batch_tokens is None else max_batch_tokens
        self._window_tokens = _WINDOW_BATCHES * batch_tokens
        self._batch_tokens = min(batch_tokens, _tokens_that_fit(session.manifest, task))
        self._known_good: Encoding | None = None

    def windows(self, rows: Iterable[Row]) -> Iterator[list[Item]]:
        """Rows, tokenised, in groups that bound the memory and are large enough to be sorted by length."""
        window: list[Item] = []
        tokens = 0
        for chunk in _chunks(rows):
            items = self._tokenized(chunk)
            window += items
            tokens += sum(_lengths(items))
            if len(window) >= _WINDOW_ROWS or tokens >= self._window_tokens:
                yield window
                window, tokens = [], 0
        if window:
            yield window

    def infer(self, window: Sequence[Item]) -> Iterator[list[Item]]:
        """Give every item of a window its values or its error.

        Yields:
            the items that are done, batch by batch, in any order.

        Raises:
            BackendError: every row failed and so does one that ran before: it is the session that is broken.
        """
        waiting = [item for item in window if item.encoding is not None]
        yield [item for item in window if item.encoding is None]
        failures: list[BackendError] = []
        for batch in pack_by_tokens(_lengths(waiting), batch_tokens=self._batch_tokens):
            items = [waiting[index] for index in batch]
            failures += self._infer_batch(items)
            yield items
        if failures and len(failures) == len(waiting):
            self._require_working_session(failures[0])

    def _tokenized(self, rows: list[Row]) -> list[Item]:
        items = [Item(row=row, error=row.error) for row in rows]
        readable = [item for item in items if item.error is None]
        try:
            self._tokenize(readable)
        except InputError:
            # One of them does not fit; only by itself does each tell whether it is the one.
            for item in readable:
                try:
                    self._tokenize([item])
                except InputError as error:
                    item.error = str(error)
        return items

    def _tokenize(self, items: list[Item]) -> None:
        texts = [item.row.text for item in items]
        pairs = [item.row.text_pair for item in items if item.row.text_pair is not None]
        encodings = self._session.tokenize(texts, pairs or None, overflow=self._overflow)
        for item, encoding in zip(items, encodings, strict=True):
            item.encoding = encoding

    def _infer_batch(self, items: list[Item]) -> list[BackendError]:
        """The errors that may be the session's rather than a row's."""
        try:
            self._infer_items(items)
        except (BackendError, InputError) as error:
            logger.info("a batch of %d rows failed, running them one by one: %s", len(items), error)
        else:
            return []
        failures: list[BackendError] = []
        for item in items:
            try:
                self._infer_items([item])
            except (NonFiniteOutputError, InputError) as error:
                item.error = str(error)
            except BackendError as error:
                item.error = str(error)
                failures.append(error)
        return failures

    def _infer_items(self, items: list[Item]) -> None:
        encodings = [item.encoding for item in items if item.encoding is not None]
        results = self._session.infer(encodings, batch_tokens=self._batch_tokens, outputs=self._task.outputs)
        self._known_good = encodings[-1]
        for item, encoding, outputs in zip(items, encodings, results, strict=True):
            try:
                item.values = self._task.values(outputs, encoding, item.row)
            except InputError as error:
                item.error = str(error)

    def _require_working_session(self, failure: BackendError) -> None:
        """Raise the failure if the session does not run what it ran before, or never ran anything."""
        if self._known_good is None:
            raise failure
        try:
            self._session.infer([self._known_good], outputs=self._task.outputs)
        except BackendError:
            raise failure from None


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += len(row.text) + len(row.text_pair or "")
        if len(chunk) == _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _lengths(items: Sequence[Item]) -> list[int]:
    return [len(item.encoding) for item in items if item.encoding is not None]


def _tokens_that_fit(manifest: Manifest, task: TaskResults) -> int:
    """Tokens whose outputs take `_OUTPUT_BYTES`."""
    bytes_per_token = 0
    for spec in manifest.outputs:
        if spec.name in task.outputs and "tokens" in spec.shape:
            bytes_per_token += 4 * math.prod(size for size in spec.shape if isinstance(size, int))
    return max(1, _OUTPUT_BYTES // max(1, bytes_per_token))
