"""Which requests a server accepts: what it can answer within the timeout at the rate that it measures."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

from hdruntime.errors import HdexportError, InputError, Message, Setting
from hdruntime.serve.fair_queue import AcceptedRequest, length_class

_MAX_LOAD = 0.6
"""A request is accepted if all accepted requests can be answered within this share of the new request's time."""

_LATE = 0.7
"""A request that needs this share of its remaining time, including the requests before it, ends the turns: the oldest
request runs first. The difference to `_MAX_LOAD` is for turns of later clients, and the rest for a machine that becomes
slower."""

RESERVED_SHARE = 0.2
"""Share of a client's time and tokens that the client must leave to others."""

_TOO_LATE = 1.5
"""A request that needs this multiple of its remaining time does not run first, since it would be late anyway."""

_SMALL_REQUEST = 0.01
"""A client without other requests may always send a request that needs this share of its time."""

_DECAY = 0.9
_FAST_DECAY = 0.5
"""Weights of earlier batches in two moving averages of the rate, over ten and two batches; the slower rate counts."""

_TOKENS_PER_CHARACTER = 0.5
"""Estimate before the first text: twice the tokens of English, and half the tokens of Chinese."""

_SPECIAL_TOKENS = 2


class OverloadedError(HdexportError):
    """The server cannot answer the request in time beside the accepted requests, or its queue is full.

    Attributes:
        retry_after: estimated seconds until the server accepts the request.
    """

    def __init__(self, *problem: str | Setting, retry_after: int = 1, hint: Message = "") -> None:
        super().__init__(*problem, hint=hint)
        self.retry_after = retry_after


class RequestTooLargeError(InputError):
    """The server could not answer the request in time even if it had no other request."""


def work_of(tokens: Iterable[int]) -> Counter[int]:
    """Tokens by length class, of texts of so many."""
    work: Counter[int] = Counter()
    for each in tokens:
        work[length_class(each)] += each
    return work


class Rate:
    """The seconds that a session takes for a token, by the length of its text: the mean of the last batches.

    Sessions that run at the same time slow each other down: batches that ran while every session ran one count, and
    others until there is one.

    Attributes:
        longest_batch: seconds of the longest of the last batches.
    """

    def __init__(self) -> None:
        self.longest_batch = 0.0
        self._measured: dict[int, float] = {}
        self._measured_busy: set[int] = set()
        # A length class -> the nearest one that was measured.
        self._nearest: dict[int, int] = {}
        self._sums: dict[tuple[int, float], tuple[float, float]] = {}

    def add(self, length: int, *, tokens: int, seconds: float, all_busy: bool = True) -> None:
        """Count a batch of texts of a length class; `all_busy` where every session ran a batch meanwhile."""
        self.longest_batch, slowest = max(seconds, _DECAY * self.longest_batch), 0.0
        if length in self._measured_busy and not all_busy:
            return
        if all_busy and length not in self._measured_busy:
            self._measured_busy.add(length)
            for kept in (_DECAY, _FAST_DECAY):
                self._sums.pop((length, kept), None)
        for kept in (_DECAY, _FAST_DECAY):
            before = self._sums.get((length, kept), (0.0, 0.0))
            self._sums[length, kept] = sums = kept * before[0] + seconds, kept * before[1] + tokens
            slowest = max(slowest, sums[0] / max(1.0, sums[1]))
        if length not in self._measured:
            self._nearest.clear()
        self._measured[length] = slowest

    def __bool__(self) -> bool:
        return bool(self._measured)

    def knows(self, lengths: Iterable[int]) -> bool:
        """Whether batches of all these length classes were measured, or of the next one."""
        return all(any(abs(known - length) <= 1 for known in self._measured) for length in lengths)

    def seconds(self, work: Counter[int]) -> float:
        """Seconds of tokens by length class, a class without a batch as the nearest; 0 before the first batch."""
        return sum(tokens * self._of_token(length) for length, tokens in work.items())

    def _of_token(self, length: int) -> float:
        if not self._measured:
            return 0.0
        if length not in self._nearest:
            self._nearest[length] = min(self._measured, key=lambda known: abs(known - length))
        return self._measured[self._nearest[length]]


class Admission:
    """The requests that were accepted, until they are answered.

    A request is accepted if the server could answer it and all that were accepted before within the time that it has.
    A client that has requests already leaves some of that time to others. Before the first
    batch, when no rate is known, `first_tokens` of a client are accepted, and more of them wait. `sessions` run at the
    same time.
    """

    def __init__(self, *, first_tokens: int, sessions: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = Rate()
        self._first_tokens, self._sessions, self._clock = first_tokens, sessions, clock
        self._requests: dict[AcceptedRequest, None] = {}
        # Of each client that has requests.
        self._clients: dict[str, Counter[int]] = {}
        self._number: Counter[str] = Counter()
        self._work: Counter[int] = Counter()
        self._read = (0.0, 0.0)

    def estimated(self, sizes: Iterable[int], *, max_tokens: float) -> list[int]:
        """The estimated tokens of texts that were not tokenized.

        Args:
            sizes: characters of each text.
            max_tokens: tokens to which a text is truncated.
        """
        characters, tokens = self._read
        ratio = tokens / characters if characters else _TOKENS_PER_CHARACTER
        return [math.ceil(min(max_tokens, _SPECIAL_TOKENS + size * ratio)) for size in sizes]

    def note_tokenized(self, *, characters: int, tokens: int) -> None:
        """Remember how many tokens texts have."""
        before = self._read
        self._read = _DECAY * before[0] + characters, _DECAY * before[1] + tokens

    def waits_for_rate(self, client: str, work: Counter[int]) -> bool:
        """Whether a request has to wait for the first batch, which tells how long others take."""
        own = self._clients.get(client)
        return not self.rate and own is not None and own.total() + work.total() > self._first_tokens

    def accept(self, client: str, work: Counter[int], *, within_s: float) -> AcceptedRequest:
        """Accept a request, or raise an OverloadedError or a RequestTooLargeError.

        Args:
            client: client that sent the request.
            work: tokens by length class.
            within_s: the time in which it has to be answered.
        """
        seconds = self._seconds(work)
        if seconds > within_s and self.rate.knows(work):
            longer = Setting("timeout", command="serve")
            raise RequestTooLargeError(
                f"The texts would take about {seconds:.0f} seconds; a request must be answered within {within_s:.0f}.",
                hint=("Send fewer texts in a request, or start the server with a longer ", longer, "."),
            )
        if self._requests:
            self._check_others(client, work, within_s=within_s)
        request = AcceptedRequest(client, self._clock() + within_s)
        self._requests[request] = None
        self._number[client] += 1
        self.add(request, work)
        return request

    def overloaded(self, reason: str, again_s: float = math.inf) -> OverloadedError:
        """The error of a request that is rejected, to be sent again after so many seconds, or when nothing waits."""
        seconds = max(1, math.ceil(min(self._seconds(self._work), again_s)))
        return OverloadedError(reason, hint=f"Send the request again after {seconds} seconds.", retry_after=seconds)

    def add(self, request: AcceptedRequest, work: Counter[int]) -> None:
        for each in (request.work, self._clients.setdefault(request.client, Counter()), self._work):
            each.update(work)

    def done(self, request: AcceptedRequest, work: Counter[int]) -> None:
        """Take work off an accepted request."""
        if request in self._requests:
            for each in (request.work, self._clients[request.client], self._work):
                each.subtract(work)

    def leave(self, request: AcceptedRequest) -> None:
        """Forget a request, which has its answer or needs none."""
        if request not in self._requests:
            return
        self.done(request, Counter(request.work))
        del self._requests[request]
        self._number[request.client] -= 1
        if not self._number[request.client]:
            del self._number[request.client], self._clients[request.client]

    def late(self) -> AcceptedRequest | None:
        """The request that has to run now so that requests are answered in time, the first one whose time ends; None
        where clients may take turns."""
        if not self._requests:
            return None
        # A batch that begins now has to end first, and so has the last one of a request.
        now, batches = self._clock(), 2 * self.rate.longest_batch
        first_left = min(request.deadline for request in self._requests) - now
        if self._seconds(self._work) + batches < _LATE * first_left:
            return None
        before, first = 0.0, None
        for request in sorted(self._requests, key=lambda request: request.deadline):
            left, needed = request.deadline - now, before + self._seconds(request.work)
            if needed > _TOO_LATE * left:
                continue
            before = needed
            if first is None and request.waiting:
                first = request
            if needed + batches >= _LATE * left:
                return first
        return None

    def _seconds(self, work: Counter[int]) -> float:
        """Seconds of work that all sessions do, of which one does all of a text's."""
        seconds = self.rate.seconds(work)
        if self._sessions == 1:
            return seconds
        of_text = (self.rate.seconds(Counter({length: min(tokens, 2**length)})) for length, tokens in work.items())
        return max(seconds / self._sessions, *of_text, 0.0)

    def _check_others(self, client: str, work: Counter[int], *, within_s: float) -> None:
        waits, seconds = self._seconds(self._work), self._seconds(work)
        again = waits + seconds - _MAX_LOAD * within_s
        own = self._clients.get(client)
        if own is None and seconds <= _SMALL_REQUEST * within_s:
            # In turns with the others, it is answered long before them.
            others = (min(seconds, self._seconds(work)) for work in self._clients.values())
            again = seconds + sum(others) - _MAX_LOAD * within_s
        elif own is not None:
            again += RESERVED_SHARE * (self._seconds(own) + seconds)
        if again > 0:
            raise self.overloaded(
                f"The server is busy for {waits:.0f} seconds and answers within {within_s:.0f}, which leaves no time "
                f"for these texts ({seconds:.1f} seconds).",
                again,
            )
