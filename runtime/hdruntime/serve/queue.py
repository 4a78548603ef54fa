"""Texts that wait for a session: batches of similar lengths, the oldest first, clients in turns."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hdruntime.errors import HdexportError
from hdruntime.inference.batching import grouped
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_inference import TextInference, TextItem

_WINDOW_CHARACTERS = 2**17
"""Characters of a call that are tokenized at a time; a longer text goes alone."""

_FEW_CHARACTERS = 2**10
"""A window of at most so many characters is tokenized in the event loop's thread: a short text takes less time there
than the loop takes to wake another thread and to be woken, and 2**10 characters take 0.3 ms (Intel Xeon,
2026-11-28)."""

_SHORT_CHARACTERS = 2**14
"""A window of at most so many characters is tokenized within some milliseconds, and waits for no longer one."""

_SHORT_TEXT_THREADS = 2
TOKENIZER_THREADS = _SHORT_TEXT_THREADS + 1
"""Threads that tokenize texts; one of them tokenizes long texts."""

_Class = tuple[TextTask, int]
"""The texts' task, and the power of two that their tokens do not exceed: texts of a batch share both."""


class QueueFullError(HdexportError):
    """The texts of a request do not fit beside those that wait."""


@dataclass(eq=False)
class _Request:
    """A window of the texts of one call: `answered` is done when no text is `missing` an answer."""

    answered: asyncio.Future[None]
    missing: int


@dataclass(eq=False)
class _Waiting:
    item: TextItem
    inference: TextInference
    tokens: int
    request: _Request
    arrived: float = field(default_factory=time.monotonic)


class TextQueue:
    """Runs the texts of many calls in batches, in one thread, and tokenizes them in others.

    A batch has texts of one task whose lengths differ by less than a factor of two: a short text waits neither for a
    long one in its batch nor for its padding. The batch begins with the text that waits longest, and takes texts of all
    clients in turns. A text waits at most `max_wait_s` for others; `on_batch` takes the texts and the tokens of each
    batch.
    """

    def __init__(
        self,
        *,
        batch_tokens: int,
        most_tokens: int,
        max_wait_s: float,
        on_batch: Callable[[int, int], None] = lambda texts, tokens: None,
    ) -> None:
        self._batch_tokens, self._most_tokens, self._max_wait_s = batch_tokens, most_tokens, max_wait_s
        self._on_batch = on_batch
        self._classes: dict[_Class, OrderedDict[str, deque[_Waiting]]] = {}
        self._tokens_of: dict[_Class, int] = {}
        # The class whose batch is filled now; None while the queue waits for a text.
        self._filling: _Class | None = None
        self._changed = asyncio.Event()
        self._short_texts = ThreadPoolExecutor(max_workers=_SHORT_TEXT_THREADS, thread_name_prefix="tokenizer")
        self._long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-of-long-texts")
        self._running = ThreadPoolExecutor(max_workers=1, thread_name_prefix="session")

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return sum(self._tokens_of.values())

    async def answer(
        self, inference: TextInference, task: TextTask, texts: Sequence[Text], *, client: str
    ) -> list[TextItem]:
        """The texts with their answers, or those up to an error. A call that is cancelled leaves the queue.

        Of a large call some texts are tokenized at a time, while those before them run. A QueueFullError says that too
        many tokens wait.
        """
        sizes = [text.characters for text in texts]
        items: list[TextItem] = []
        requests: list[_Request] = []
        try:
            for window in grouped(sizes, most=len(texts), most_in_all=_WINDOW_CHARACTERS):
                # The window before may wait or run meanwhile, and no other.
                await _all_answered(requests[:-1])
                tokenized = await self._tokenized(inference, texts[window], sum(sizes[window]))
                items += tokenized
                if any(item.error for item in tokenized):
                    return items
                tokens = sum(map(_tokens_of, tokenized))
                is_full = bool(self.tokens) and self.tokens + tokens > self._most_tokens
                if is_full and not requests:
                    raise QueueFullError("Too many tokens wait for an answer. Try again later.")
                if is_full:
                    await _all_answered(requests)
                requests.append(self._enqueued(tokenized, inference, task, client))
            await _all_answered(requests)
            return items
        finally:
            for request in requests:
                request.answered.cancel()

    async def _tokenized(self, inference: TextInference, texts: Sequence[Text], characters: int) -> list[TextItem]:
        if characters <= _FEW_CHARACTERS:
            return inference.encode(texts)
        pool = self._short_texts if characters <= _SHORT_CHARACTERS else self._long_texts
        return await asyncio.get_running_loop().run_in_executor(pool, inference.encode, texts)

    def _enqueued(self, items: Sequence[TextItem], inference: TextInference, task: TextTask, client: str) -> _Request:
        request = _Request(asyncio.get_running_loop().create_future(), len(items))
        for item in items:
            assert item.encoding is not None
            tokens = _tokens_of(item)
            longest = max(map(len, item.encoding.pieces), default=1)
            key = (task, max(1, longest - 1).bit_length())
            self._classes.setdefault(key, OrderedDict()).setdefault(client, deque()).append(
                _Waiting(item, inference, tokens, request)
            )
            self._tokens_of[key] = self._tokens_of.get(key, 0) + tokens
        if self._filling is None or self._tokens_of[self._filling] >= self._batch_tokens:
            self._changed.set()
        return request

    async def run(self) -> None:
        """Run batches until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            key = self._oldest()
            if key is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            await self._filled(key)
            batch = self._taken(key)
            if not batch:
                continue
            try:
                await loop.run_in_executor(self._running, batch[0].inference.run, [each.item for each in batch])
            except Exception as error:
                for each in batch:
                    if not each.request.answered.done():
                        each.request.answered.set_exception(error)
                continue
            self._on_batch(len(batch), sum(each.tokens for each in batch))
            for each in batch:
                each.request.missing -= 1
                if not each.request.missing and not each.request.answered.done():
                    each.request.answered.set_result(None)

    def close(self) -> None:
        """End the threads, after the batch that runs."""
        self._short_texts.shutdown(cancel_futures=True)
        self._long_texts.shutdown(cancel_futures=True)
        self._running.shutdown(cancel_futures=True)

    def _oldest(self) -> _Class | None:
        """The class of the text that waits longest."""
        heads = {key: min(each[0].arrived for each in clients.values()) for key, clients in self._classes.items()}
        return min(heads, key=heads.__getitem__, default=None)

    async def _filled(self, key: _Class) -> None:
        """Wait until a batch is full, or its first text has waited long enough."""
        left = min(each[0].arrived for each in self._classes[key].values()) + self._max_wait_s - time.monotonic()
        if left <= 0 or self._tokens_of[key] >= self._batch_tokens:
            return
        self._filling = key
        self._changed.clear()
        waited = asyncio.get_running_loop().call_later(left, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            waited.cancel()
            self._filling = None

    def _taken(self, key: _Class) -> list[_Waiting]:
        """A batch of texts, taken out of the queue; texts of calls that were cancelled are taken out, too."""
        clients, batch, tokens = self._classes[key], list[_Waiting](), 0
        while clients and (not batch or tokens < self._batch_tokens):
            client, waiting = clients.popitem(last=False)
            first = waiting.popleft()
            self._tokens_of[key] -= first.tokens
            if waiting:
                # The last in turn from now on.
                clients[client] = waiting
            if not first.request.answered.done():
                batch.append(first)
                tokens += first.tokens
        if not clients:
            del self._classes[key], self._tokens_of[key]
        return batch


async def _all_answered(requests: Sequence[_Request]) -> None:
    for request in requests:
        await request.answered


def _tokens_of(item: TextItem) -> int:
    return 0 if item.encoding is None else sum(map(len, item.encoding.pieces))
