"""Texts that wait for the sessions of a model: tokenized a window at a time, and run in batches of similar lengths."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hdruntime.packing import grouped
from hdruntime.serve.admission import RESERVED_SHARE, Admission, work_of
from hdruntime.serve.fair_queue import AcceptedRequest, BatchClass, Entry, EntryGroup, FairQueue, length_class
from hdruntime.session import Session
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_inference import EncodedChunk, TextInference, TextItem, chunks_of

_WINDOW_CHARACTERS = 2**17
"""Characters of a request that are tokenized at a time; a longer text is tokenized alone."""

_FEW_CHARACTERS = 2**10
"""Maximum characters that are tokenized in the event loop's thread: tokenizing a short text takes less time than waking
another thread and being woken, and 2**10 characters take 0.3 ms (Intel Xeon,
2026-11-28)."""

_SHORT_CHARACTERS = 2**14
"""Maximum characters of a short window, which is tokenized within milliseconds and does not wait for long ones."""

_SHORT_TEXT_THREADS = 2
TOKENIZER_THREADS = _SHORT_TEXT_THREADS + 1
"""Threads that tokenize texts; one of them tokenizes long texts."""

_FIRST_BATCHES = 2
"""Maximum batches of a client that wait before the first batch has shown how long a batch takes."""

_BATCH_SECONDS = 0.25
"""Target duration of a batch: the next client waits for it."""

_SHORT_TOKENS = 256
"""Maximum tokens of a batch that may run beside a batch of other clients."""


@dataclass(eq=False)
class _SessionThread:
    """A thread that runs one batch at a time in a session, and the batch that runs."""

    thread: ThreadPoolExecutor
    session: Session | None
    batch: Sequence[Entry] = ()


class TextQueue:
    """Tokenizes the texts of many requests in other threads, and runs them in batches.

    A batch has chunks of one task whose lengths differ by less than a factor of two, which bounds padding. Clients take
    turns, see `FairQueue`; the client whose turn it is decides the length class of the batch. A batch runs in the
    session that waits longest. While every session runs a batch, another thread runs short texts of clients that are in
    none of the batches, in the first session.

    Args:
        batch_tokens: maximum tokens of a batch, padding included.
        max_tokens: maximum tokens that wait.
        max_wait_s: maximum seconds that a text waits for others to share its batch.
        sessions: sessions of the model, equally fast; None for the session of each request's `TextInference`.
        on_batch: called with the texts and the tokens of each batch.
        clock: the monotonic clock.
    """

    def __init__(
        self,
        *,
        batch_tokens: int,
        max_tokens: int,
        max_wait_s: float,
        sessions: Sequence[Session | None] = (None,),
        on_batch: Callable[[int, int], None] = lambda texts, tokens: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch_tokens, self._max_tokens, self._max_wait_s = batch_tokens, max_tokens, max_wait_s
        self._on_batch, self._clock = on_batch, clock
        self._waiting = FairQueue()
        self._admission = Admission(
            first_tokens=_FIRST_BATCHES * batch_tokens * len(sessions), sessions=len(sessions), clock=clock
        )
        # Sessions choose their batches one after the other.
        self._choosing = asyncio.Lock()
        # The class whose batch is filled now; None while the queue waits for a text.
        self._filling: BatchClass | None = None
        self._changed, self._has_short, self._has_run = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._short_texts = ThreadPoolExecutor(max_workers=_SHORT_TEXT_THREADS, thread_name_prefix="tokenizer")
        self._long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-of-long-texts")
        self._workers = [_worker("session", session) for session in sessions]
        self._beside = _worker("session-of-short-texts", sessions[0])

    @property
    def tokens(self) -> int:
        return self._waiting.tokens

    async def answer(
        self,
        inference: TextInference,
        task: TextTask,
        texts: Sequence[Text],
        *,
        client: str,
        within_s: float = math.inf,
    ) -> list[TextItem]:
        """The texts of a request with their answers, or the texts up to an error.

        The texts of a large request are tokenized in windows, while earlier windows run. A cancelled call leaves the
        queue.

        Raises:
            OverloadedError: the answers would not be there within `within_s`, or too many tokens wait.
            RequestTooLargeError: the answers would not be there within `within_s` even in an empty queue.
        """
        sizes = [text.characters for text in texts]
        deadline = self._clock() + within_s
        estimated = self._admission.estimated(sizes, max_tokens=inference.max_tokens)
        while self._admission.waits_for_rate(client, work_of(estimated)):
            self._has_run.clear()
            await self._has_run.wait()
        request = self._admission.accept(client, work_of(estimated), within_s=deadline - self._clock())
        items: list[TextItem] = []
        groups: list[EntryGroup] = []
        try:
            for window in grouped(sizes, max_items=len(texts), max_total=_WINDOW_CHARACTERS):
                # The window before may wait or run meanwhile, and no other.
                await _all_answered(groups[:-1])
                tokenized = await self._tokenized(inference, texts[window], sum(sizes[window]))
                items += tokenized
                if any(item.error for item in tokenized):
                    return items
                self._admission.done(request, work_of(estimated[window]))
                chunks = chunks_of(tokenized)
                tokens = sum(len(chunk.encoding) for chunk in chunks)
                self._admission.note_tokenized(characters=sum(sizes[window]), tokens=tokens)
                # As with the time, see `Admission`.
                left = RESERVED_SHARE * self._waiting.tokens_of_client(client)
                is_full = bool(self.tokens) and self.tokens + tokens + left > self._max_tokens
                if is_full and not groups:
                    raise self._admission.overloaded("Too many tokens wait for an answer.")
                if is_full:
                    await _all_answered(groups)
                groups.append(self._enqueued(chunks, inference, task, request))
            await _all_answered(groups)
            return items
        finally:
            for each in groups:
                each.answered.cancel()
            self._waiting.remove(request)
            self._admission.leave(request)
            self._has_run.set()

    async def _tokenized(self, inference: TextInference, texts: Sequence[Text], characters: int) -> list[TextItem]:
        if characters <= _FEW_CHARACTERS:
            return inference.encode(texts)
        pool = self._short_texts if characters <= _SHORT_CHARACTERS else self._long_texts
        return await asyncio.get_running_loop().run_in_executor(pool, inference.encode, texts)

    def _enqueued(
        self, chunks: Sequence[EncodedChunk], inference: TextInference, task: TextTask, request: AcceptedRequest
    ) -> EntryGroup:
        group = EntryGroup(asyncio.get_running_loop().create_future(), len(chunks))
        self._admission.add(request, work_of(len(chunk.encoding) for chunk in chunks))
        now = self._clock()
        for chunk in chunks:
            tokens = len(chunk.encoding)
            entry = Entry(
                chunk=chunk, inference=inference, request=request, group=group, tokens=tokens, arrived=now,
                batch_class=(task, length_class(tokens)),
            )  # fmt: skip
            self._waiting.add(entry)
        if self._filling is None or self._waiting.tokens_of(self._filling) >= self._batch_tokens:
            self._changed.set()
        self._has_short.set()
        return group

    async def run(self) -> None:
        """Run batches until cancelled."""
        in_turns = [asyncio.ensure_future(self._run_in_turns(worker)) for worker in self._workers]
        loops = [*in_turns, asyncio.ensure_future(self._run_beside())]
        try:
            await asyncio.gather(*loops)
        finally:
            for loop in loops:
                loop.cancel()

    async def _run_in_turns(self, worker: _SessionThread) -> None:
        while True:
            async with self._choosing:
                batch = await self._next_batch()
            await self._run(batch, worker)

    async def _next_batch(self) -> Sequence[Entry]:
        """The batch whose turn it is, taken from the queue."""
        while True:
            late = self._admission.late()
            if late is not None:
                most = self._tokens_of_batch(max(length for _, length in late.waiting))
                return self._waiting.take_of(late, batch_tokens=most)
            lead = self._waiting.first()
            if lead is None:
                self._changed.clear()
                await self._changed.wait()
            elif not await self._waits_for_others(lead):
                return self._waiting.take(lead, batch_tokens=self._tokens_of_batch(lead.batch_class[1]))

    async def _run_beside(self) -> None:
        """Run short texts of other clients while every session runs a batch."""
        while True:
            await self._has_short.wait()
            self._has_short.clear()
            while self._all_busy:
                busy = {each.request.client for worker in self._workers for each in worker.batch}
                lead = self._waiting.first(without=busy, longest=length_class(_SHORT_TOKENS))
                if lead is None:
                    break
                await self._run(self._waiting.take(lead, batch_tokens=_SHORT_TOKENS, without=busy), self._beside)

    @property
    def _all_busy(self) -> bool:
        return all(worker.batch for worker in self._workers)

    async def _run(self, batch: Sequence[Entry], worker: _SessionThread) -> None:
        worker.batch, began, error = batch, self._clock(), None
        self._has_short.set()
        all_busy = self._all_busy
        inference = batch[0].inference
        if worker.session is not None:
            inference = inference.with_session(worker.session)
        try:
            chunks = [each.chunk for each in batch]
            await asyncio.get_running_loop().run_in_executor(worker.thread, inference.run_chunks, chunks)
        except Exception as failure:
            error = failure
        finally:
            all_busy = all_busy and self._all_busy
            worker.batch = ()
        length, tokens_of = batch[0].batch_class[1], Counter[AcceptedRequest]()
        for each in batch:
            tokens_of[each.request] += each.tokens
        for request, tokens in tokens_of.items():
            self._admission.done(request, Counter({length: tokens}))
        if error is None:
            # Also where another batch ran beside it, as none may run the next time.
            seconds = self._clock() - began
            self._admission.rate.add(length, tokens=tokens_of.total(), seconds=seconds, all_busy=all_busy)
            self._on_batch(len(batch), tokens_of.total())
        self._has_run.set()
        for each in batch:
            each.group.tell(error)

    def close(self) -> None:
        """End the threads, after the batch that runs."""
        self._short_texts.shutdown(cancel_futures=True)
        self._long_texts.shutdown(cancel_futures=True)
        for worker in (*self._workers, self._beside):
            worker.thread.shutdown(cancel_futures=True)

    def _tokens_of_batch(self, length: int) -> int:
        """Tokens after which a batch of a length class is full."""
        seconds = self._admission.rate.seconds(Counter({length: self._batch_tokens}))
        return int(self._batch_tokens * min(1.0, _BATCH_SECONDS / seconds)) if seconds else self._batch_tokens

    async def _waits_for_others(self, lead: Entry) -> bool:
        """Wait a moment for texts that share the lead's batch; False where that is over, or a batch is full."""
        left = lead.arrived + self._max_wait_s - self._clock()
        if left <= 0 or self._waiting.tokens_of(lead.batch_class) >= self._batch_tokens:
            return False
        self._filling = lead.batch_class
        self._changed.clear()
        waited = asyncio.get_running_loop().call_later(left, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            waited.cancel()
            self._filling = None
        return True


def _worker(name: str, session: Session | None) -> _SessionThread:
    return _SessionThread(ThreadPoolExecutor(max_workers=1, thread_name_prefix=name), session)


async def _all_answered(groups: Sequence[EntryGroup]) -> None:
    for group in groups:
        await group.answered
