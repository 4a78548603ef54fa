"""Which requests a server accepts: what it can answer within the timeout at the rate that it measures."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from hdruntime.errors import HdexportError, InputError, Message, Setting
from hdruntime.serve.fair_queue import AcceptedRequest, length_class

_FILLED, _LATE = 0.6, 0.8
"""Requests are accepted as long as all of them can be answered within 0.6 of the time that the new one has. A request
that needs 0.8 of the time that it has left, with those before it, ends the turns: the oldest goes first. The difference
is for turns of clients that come later, and the rest for a machine that gets slower."""

LEFT = 0.2
"""A client leaves to others a fifth of the time and of the tokens that it takes itself."""

_TOO_LATE = 1.5
"""A request that needs so many times the time that it has left does not go first, as it would be late all the same."""

_LITTLE = 0.01
"""A client without other requests gets one that needs so little of the time that it has, whatever waits of others."""

_KEPT = 0.9
_KEPT_OF_LAST = 0.5
"""Weight of the batches before against one more batch, in the measured rate: the slower one of two, of about ten and of
two batches, counts."""

_TOKENS_PER_CHARACTER = 0.5
"""Before the first text: twice the tokens of English, and half of those of Chinese."""

_SPECIAL_TOKENS = 2


class OverloadedError(HdexportError):
    """A request is refused since the server could not answer it in time, or has no room for it.

    Attributes:
        retry_after: seconds until it has, as far as is known.
    """

    def __init__(self, *problem: str | Setting, retry_after: int = 1, hint: Message = "") -> None:
        super().__init__(*problem, hint=hint)
        self.retry_after = retry_after


class RequestTooLargeError(InputError):
    """A request is refused since the server could not answer it in time if it had no other."""


def work_of(tokens: Iterable[int]) -> Counter[int]:
    """Tokens by length class, of texts of so many."""
    work: Counter[int] = Counter()
    for each in tokens:
        work[length_class(each)] += each
    return work


class Rate:
    """The seconds that a session takes for a token, by the length of its text: the mean of the last batches.

    `longest_batch` has the seconds of the longest of the last batches.
    """

    def __init__(self) -> None:
        self.longest_batch = 0.0
        self._measured: dict[int, float] = {}
        self._sums: dict[tuple[int, float], tuple[float, float]] = {}

    def add(self, length: int, *, tokens: int, seconds: float) -> None:
        """Count a batch of texts of a length class."""
        self.longest_batch, slowest = max(seconds, _KEPT * self.longest_batch), 0.0
        for kept in (_KEPT, _KEPT_OF_LAST):
            before = self._sums.get((length, kept), (0.0, 0.0))
            self._sums[length, kept] = sums = kept * before[0] + seconds, kept * before[1] + tokens
            slowest = max(slowest, sums[0] / max(1.0, sums[1]))
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
        nearest = min(self._measured, key=lambda known: abs(known - length))
        return self._measured[nearest]


class Admission:
    """The requests that were accepted, until they are answered.

    A request is accepted if the server could answer it and all that were accepted before within the time that it has.
    A client that has requests already leaves some of that time to others. Before the first
    batch, when no rate is known, `first_tokens` of a client are accepted, and more of them wait.
    """

    def __init__(self, *, first_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = Rate()
        self._first_tokens, self._clock = first_tokens, clock
        self._requests: dict[AcceptedRequest, None] = {}
        # Of each client that has requests.
        self._clients: dict[str, Counter[int]] = {}
        self._number: Counter[str] = Counter()
        self._work: Counter[int] = Counter()
        self._read = (0.0, 0.0)

    def estimated(self, sizes: Iterable[int], *, most: float) -> list[int]:
        """The tokens of texts that were not tokenized, of so many characters.

        Args:
            sizes: characters of each text.
            most: tokens to which a text is truncated.
        """
        characters, tokens = self._read
        ratio = tokens / characters if characters else _TOKENS_PER_CHARACTER
        return [math.ceil(min(most, _SPECIAL_TOKENS + size * ratio)) for size in sizes]

    def note_tokenized(self, *, characters: int, tokens: int) -> None:
        """Remember how many tokens texts have."""
        before = self._read
        self._read = _KEPT * before[0] + characters, _KEPT * before[1] + tokens

    def waits_for_rate(self, client: str, work: Counter[int]) -> bool:
        """Whether a request has to wait for the first batch, which tells how long others take."""
        own = self._clients.get(client)
        return not self.rate and own is not None and own.total() + work.total() > self._first_tokens

    def accept(self, client: str, work: Counter[int], *, within_s: float) -> AcceptedRequest:
        """Accept a request, or raise an OverloadedError or a RequestTooLargeError.

        Args:
            client: whose request it is.
            work: tokens by length class.
            within_s: the time in which it has to be answered.
        """
        seconds = self.rate.seconds(work)
        if seconds > within_s and self.rate.knows(work):
            raise RequestTooLargeError(
                f"The texts would take about {seconds:.0f} seconds, and an answer has to be there within "
                f"{within_s:.0f}. Send fewer texts in a request, or start the server with a longer --timeout."
            )
        if self._requests:
            self._check_others(client, work, within_s=within_s)
        request = AcceptedRequest(client, self._clock() + within_s)
        self._requests[request] = None
        self._number[client] += 1
        self.add(request, work)
        return request

    def overloaded(self, reason: str, again_s: float = math.inf) -> OverloadedError:
        """The error of a request that is refused, to be sent again after so many seconds, or when nothing waits."""
        seconds = max(1, math.ceil(min(self.rate.seconds(self._work), again_s)))
        return OverloadedError(f"{reason} Send the request again after {seconds} seconds.", retry_after=seconds)

    def add(self, request: AcceptedRequest, work: Counter[int]) -> None:
        """Add work to an accepted request."""
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

    def late(self, *, without: Collection[AcceptedRequest] = ()) -> AcceptedRequest | None:
        """The request that has to run now so that requests are answered in time, the first one whose time ends; None
        where clients may take turns.

        Args:
            without: requests that have no turn now.
        """
        if not self._requests:
            return None
        # A batch that begins now has to end first, and so has the last one of a request.
        now, batches = self._clock(), 2 * self.rate.longest_batch
        first_left = min(request.deadline for request in self._requests) - now
        if self.rate.seconds(self._work) + batches < _LATE * first_left:
            return None
        before, first = 0.0, None
        for request in sorted(self._requests, key=lambda request: request.deadline):
            left, needed = request.deadline - now, before + self.rate.seconds(request.work)
            if needed > _TOO_LATE * left:
                continue
            before = needed
            if first is None and request.waiting and request not in without:
                first = request
            if needed + batches >= _LATE * left:
                return first
        return None

    def _check_others(self, client: str, work: Counter[int], *, within_s: float) -> None:
        waits, seconds = self.rate.seconds(self._work), self.rate.seconds(work)
        again = waits + seconds - _FILLED * within_s
        own = self._clients.get(client)
        if own is None and seconds <= _LITTLE * within_s:
            # In turns with the others, it is answered long before them.
            others = (min(seconds, self.rate.seconds(work)) for work in self._clients.values())
            again = seconds + sum(others) - _FILLED * within_s
        elif own is not None:
            again += LEFT * (self.rate.seconds(own) + seconds)
        if again > 0:
            raise self.overloaded(
                f"The server is busy for {waits:.0f} seconds and answers within {within_s:.0f}, which leaves no time "
                f"for these texts ({seconds:.1f} seconds).",
                again,
            )
