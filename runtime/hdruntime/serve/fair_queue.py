"""A fair queue of the chunks that wait for a session: clients take turns, and small requests of a client go first."""

from __future__ import annotations

import asyncio
import functools
import heapq
import ipaddress
import itertools
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hdruntime.tasks.task import TextTask
from hdruntime.tasks.text_inference import EncodedChunk, TextInference

_SHARE = 2
"""Maximum tokens of another client in a batch, as a multiple of the tokens of the client whose turn it is: a short text
does not wait for a batch that another client alone would fill."""

BatchClass = tuple[TextTask, int]
"""The task of chunks and their length class, which the chunks of a batch share."""


@functools.lru_cache(4096)
def client_of(host: str) -> str:
    """The client of an address: the IPv4 address, or the /64 network of an IPv6 address.

    A host that opens many connections is one client, and so is a host that uses many addresses of its network.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        # A socket of Unix, or a proxy's own word.
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def length_class(tokens: int) -> int:
    """The exponent of the smallest power of two that is at least the number of tokens."""
    return max(1, tokens - 1).bit_length()


@dataclass(eq=False)
class AcceptedRequest:
    """A request that was accepted, of which chunks wait or will wait.

    Attributes:
        client: the client, see `client_of`.
        deadline: the time of the monotonic clock by which the request is answered.
        work: length class -> tokens that have no outputs yet.
        waiting: chunks that wait, by the class of their batch.
        turn: tokens of its client, in all, after which it would be answered if the requests of the client took turns;
            the request with the smallest number runs first.
    """

    client: str
    deadline: float
    work: Counter[int] = field(default_factory=Counter)
    waiting: dict[BatchClass, deque[Entry]] = field(default_factory=dict)
    turn: float = 0.0


@dataclass(eq=False)
class EntryGroup:
    """Chunks of a request that wait together; `answered` is done when the outputs of no chunk are `missing`."""

    answered: asyncio.Future[None]
    missing: int

    def tell(self, error: Exception | None) -> None:
        """Count a chunk that has run, or set its error."""
        self.missing -= 1
        if self.answered.done():
            return
        if error is not None:
            self.answered.set_exception(error)
        elif not self.missing:
            self.answered.set_result(None)


@dataclass(eq=False, kw_only=True)
class Entry:
    """A chunk that waits, with what runs it, its request and its group."""

    chunk: EncodedChunk
    inference: TextInference
    request: AcceptedRequest
    group: EntryGroup
    batch_class: BatchClass
    tokens: int
    arrived: float
    order: int = 0


@dataclass(eq=False)
class _Client:
    """A client's requests with chunks that wait; `turn` are the tokens that the client has had."""

    turn: float
    tokens: int = 0
    requests: dict[AcceptedRequest, None] = field(default_factory=dict)


Item = TypeVar("Item")


class _TurnQueue(Generic[Item]):
    """Items in the order of their turns; of equal turns, the item that came first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> int:
        """The order of the first entry."""
        return self._heap[0][1]

    def add(self, turn: float, order: int, item: Item) -> None:
        heapq.heappush(self._heap, (turn, order, item))

    def next(self) -> Item:
        return heapq.heappop(self._heap)[2]


class FairQueue:
    """The chunks that wait, in the order of start-time fair queueing (Goyal, Vin and Cheng, 1996).

    Clients take turns. Turns are counted in tokens: of two clients that always have chunks waiting, each gets the same
    number of tokens, whatever the number of their requests and the length of their texts. A new client gets the next
    turn.

    The requests of a client run one after the other, in about the order in which they would be answered if they took
    turns (the Fair Sojourn Protocol, Friedman and Henderson, 2003). Small requests overtake large ones, as in turns.
    Requests of one size run in the order of their arrival: in turns, later ones would delay each until about twice the
    time of all the work that was there before it.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._tokens: Counter[BatchClass] = Counter()
        self._now = 0.0
        self._orders = itertools.count()

    @property
    def tokens(self) -> int:
        return self._tokens.total()

    def tokens_of(self, batch_class: BatchClass) -> int:
        """Tokens that wait and could share a batch."""
        return self._tokens[batch_class]

    def tokens_of_client(self, client: str) -> int:
        entry = self._clients.get(client)
        return 0 if entry is None else entry.tokens

    def add(self, entry: Entry) -> None:
        """Append a chunk to its request."""
        request = entry.request
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = _Client(self._now)
        if request not in client.requests:
            client.requests[request] = None
            request.turn = client.turn + request.work.total() * len(client.requests)
        entry.order = next(self._orders)
        request.waiting.setdefault(entry.batch_class, deque()).append(entry)
        self._tokens[entry.batch_class] += entry.tokens
        client.tokens += entry.tokens

    def remove(self, request: AcceptedRequest) -> None:
        for batch_class, chunks in request.waiting.items():
            tokens = sum(each.tokens for each in chunks)
            self._tokens[batch_class] -= tokens
            self._clients[request.client].tokens -= tokens
        request.waiting.clear()
        self._forget(request)

    def first(self, *, without: Collection[str] = (), longest: int | None = None) -> Entry | None:
        """The chunk whose turn it is.

        Args:
            without: clients that have no turn now.
            longest: length class of the longest chunk that is meant; None for all.
        """
        clients: _TurnQueue[_TurnQueue[Entry]] = _TurnQueue()
        for name, client in self._clients.items():
            if name in without:
                continue
            requests: _TurnQueue[Entry] = _TurnQueue()
            for request in client.requests:
                if (head := _oldest(request, longest)) is not None:
                    requests.add(request.turn, head.order, head)
            if requests:
                clients.add(client.turn, requests.first, requests)
        return clients.next().next() if clients else None

    def take_of(self, request: AcceptedRequest, *, batch_tokens: int) -> list[Entry]:
        """Take a batch of chunks of one request, which wait longest: others would make it later."""
        batch, tokens = list[Entry](), 0
        _, batch_class = min((chunks[0].order, each) for each, chunks in request.waiting.items())
        while tokens < batch_tokens and batch_class in request.waiting:
            batch.append(request.waiting[batch_class][0])
            tokens += batch[-1].tokens
            self._take(batch[-1])
        return batch

    def take(self, lead: Entry, *, batch_tokens: int, without: Collection[str] = ()) -> list[Entry]:
        """Take a batch: the lead, and chunks that may share its batch, in turns.

        Args:
            lead: the first chunk.
            batch_tokens: tokens after which the batch is full.
            without: see `first`.
        """
        batch_class, batch, tokens = lead.batch_class, [lead], lead.tokens
        leads = lead.request.client
        self._now = max(self._now, self._clients[leads].turn)
        self._take(lead)
        shares = Counter({leads: tokens})
        lines = self._lines(batch_class, without)
        line: _TurnQueue[str] = _TurnQueue()
        for name, requests in lines.items():
            line.add(self._clients[name].turn, requests.first, name)
        while line and tokens < batch_tokens:
            name = line.next()
            if leads not in lines and name != leads and shares[name] >= _SHARE * shares[leads]:
                continue
            requests = lines[name]
            request, client = requests.next(), self._clients[name]
            entry = request.waiting[batch_class][0]
            self._take(entry)
            batch.append(entry)
            tokens += entry.tokens
            shares[name] += entry.tokens
            if batch_class in request.waiting:
                requests.add(request.turn, request.waiting[batch_class][0].order, request)
            if requests:
                line.add(client.turn, requests.first, name)
            else:
                del lines[name]
        return batch

    def _lines(self, batch_class: BatchClass, without: Collection[str]) -> dict[str, _TurnQueue[AcceptedRequest]]:
        """Clients -> their requests with chunks of a class."""
        lines: dict[str, _TurnQueue[AcceptedRequest]] = {}
        for name, client in self._clients.items():
            if name in without:
                continue
            requests: _TurnQueue[AcceptedRequest] = _TurnQueue()
            for request in client.requests:
                if batch_class in request.waiting:
                    requests.add(request.turn, request.waiting[batch_class][0].order, request)
            if requests:
                lines[name] = requests
        return lines

    def _take(self, entry: Entry) -> None:
        request, batch_class = entry.request, entry.batch_class
        chunks = request.waiting[batch_class]
        assert chunks[0] is entry, "chunks of a class run in order"
        chunks.popleft()
        if not chunks:
            del request.waiting[batch_class]
        self._tokens[batch_class] -= entry.tokens
        client = self._clients[request.client]
        client.tokens -= entry.tokens
        client.turn += entry.tokens
        self._forget(request)

    def _forget(self, request: AcceptedRequest) -> None:
        """Keep no request and no client without chunks that wait."""
        client = self._clients.get(request.client)
        if client is None or request.waiting:
            return
        client.requests.pop(request, None)
        if not client.requests:
            del self._clients[request.client]


def _oldest(request: AcceptedRequest, longest: int | None) -> Entry | None:
    heads = (chunks[0] for (_, length), chunks in request.waiting.items() if longest is None or length <= longest)
    return min(heads, key=lambda head: head.order, default=None)
