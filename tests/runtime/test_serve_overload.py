"""Clients in turns, and no more requests than can be answered: a queue in virtual time, and a server."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from hdruntime.serve.admission import OverloadedError, Rate, RequestTooLargeError
from hdruntime.serve.fair_queue import client_of
from hdruntime.serve.queue import TextQueue
from hdruntime.tasks.task import Text
from hdruntime.tasks.text_inference import TextInference
from support.serving import command
from support.virtual_time import in_virtual_time

RATE = 1000.0
"""Tokens a second of short texts."""

TIMEOUT = 30.0


def seconds_of(tokens: int) -> float:
    """The time of a text."""
    return tokens * (1 + tokens / 1000) / RATE


class Session:
    """A `TextInference` that computes nothing: a batch takes 2 ms, and a token longer in a longer text.

    `batches` are the times at which batches began, with the tokens of each text and its client.
    """

    max_tokens = 4096

    def __init__(self) -> None:
        self.batches: list[tuple[float, list[tuple[str, int]]]] = []
        self.slower = 1.0

    def encode(self, texts: list[Text]) -> list[Any]:
        return [
            SimpleNamespace(text=text, error=None, encoding=SimpleNamespace(chunks=[range(len(text.text) // 2)]))
            for text in texts
        ]

    def run_chunks(self, chunks: list[Any]) -> None:
        """Nothing: the loop has let the time pass."""

    def seconds(self, function: Callable[..., Any], arguments: Any) -> float:
        """The time of a batch; tokenizing takes none."""
        if function.__name__ != "run_chunks":
            return 0.0
        lengths = [len(chunk.encoding) for chunk in arguments[0]]
        clients = [chunk.item.text.text_pair for chunk in arguments[0]]
        self.batches.append((asyncio.get_running_loop().time(), [*zip(clients, lengths, strict=True)]))
        return self.slower * (0.002 + sum(map(seconds_of, lengths)))


Ask = Callable[..., Awaitable[None]]


def in_queue(story: Callable[[TextQueue, Session, Ask], Awaitable[Any]], **options: Any) -> Any:
    """Run a coroutine with a queue that has run one text already, and with a function that asks for texts of a client
    and of so many tokens."""
    session = Session()

    async def told() -> Any:
        queue = TextQueue(
            **{"batch_tokens": 1000, "max_tokens": 10**6, "max_wait_s": 0.0} | options,
            clock=asyncio.get_running_loop().time,
        )
        running = asyncio.create_task(queue.run())

        async def ask(client: str, *tokens: int, within_s: float = TIMEOUT) -> None:
            texts = [Text(text="ab" * each, text_pair=client) for each in tokens]
            await asyncio.wait_for(
                queue.answer(session, "task", texts, client=client, within_s=within_s),  # type: ignore[arg-type]
                within_s,
            )

        await ask("first", 100)
        await ask("first", 10)
        try:
            return await story(queue, session, ask)
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for each in (running, *others):
                each.cancel()
            await asyncio.gather(running, *others, return_exceptions=True)
            queue.close()

    return in_virtual_time(told(), session.seconds)


def now() -> float:
    return asyncio.get_running_loop().time()


async def filled(ask: Ask, client: str, *tokens: int) -> tuple[list[Awaitable[None]], OverloadedError]:
    """Requests that were accepted, as many as are, and the error of the next one."""
    asked: list[asyncio.Task[None]] = []
    while True:
        asked.append(asyncio.ensure_future(ask(client, *tokens)))
        await asyncio.sleep(1e-6)
        if asked[-1].done():
            error = asked.pop().exception()
            assert isinstance(error, OverloadedError)
            return [*asked], error


async def waited(asked: Awaitable[None]) -> float:
    """The seconds that an answer took."""
    began = now()
    await asked
    return now() - began


# Turns


@pytest.mark.parametrize("bad", [(600,) * 20, (300, 5, 40, 700) * 8, (4000,) * 3, (20,) * 900])
@pytest.mark.parametrize("tokens", [5, 40, 300, 900])
def test_a_text_of_another_client_is_in_one_of_the_next_two_batches(bad: tuple[int, ...], tokens: int) -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> int:
        asked = asyncio.ensure_future(ask("bad", *bad, within_s=1e6))
        await asyncio.sleep(0.3)
        assert not asked.done()
        before = len(session.batches)
        await ask("good", tokens, within_s=1e6)
        found = [clients for _, batch in session.batches[before:] if (clients := dict(batch))]
        return next(number for number, batch in enumerate(found) if "good" in batch)

    assert in_queue(story) <= 1


def test_clients_take_turns_in_several_sessions_and_no_session_idles() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> tuple[int, float, Counter[str]]:
        bad = asyncio.ensure_future(ask("bad", *[600] * 40, within_s=1e6))
        other = asyncio.ensure_future(ask("other", *[600] * 40, within_s=1e6))
        await asyncio.sleep(0.3)
        before, began = len(session.batches), now()
        await ask("good", 900, within_s=1e6)
        found = next(number for number, (_, batch) in enumerate(session.batches[before:]) if ("good", 900) in batch)
        seconds = now() - began
        await asyncio.sleep(10)
        shares = Counter(client for _, batch in session.batches for client, _ in batch)
        await asyncio.gather(bad, other)
        return found, seconds, shares

    number, seconds, shares = in_queue(story, sessions=[None] * 3)
    assert number <= 1, "in one of the next two batches"
    # Those that run take 0.96 seconds, and its own 1.71.
    assert seconds < 0.96 + 1.72
    assert shares["bad"] + shares["other"] > 25
    assert abs(shares["bad"] - shares["other"]) <= 1


@pytest.mark.parametrize("bad", [(600,) * 20, (4000,) * 3])
def test_a_short_text_of_another_client_runs_beside_the_batch_that_runs(bad: tuple[int, ...]) -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> float:
        load = asyncio.ensure_future(ask("bad", *bad, within_s=1e6))
        await asyncio.sleep(0.3)
        assert not load.done()
        return await waited(ask("good", 10))

    assert in_queue(story) == pytest.approx(0.0121), "as long as alone"


def test_a_client_gets_no_more_for_many_requests_or_for_longer_texts() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> Counter[str]:
        asked = [asyncio.ensure_future(ask("many", *[300] * 20, within_s=1e6)) for _ in range(64)]
        asked += [asyncio.ensure_future(ask("one", *[400] * 200, within_s=1e6))]
        asked += [asyncio.ensure_future(ask("long", *[3000] * 40, within_s=1e6))]
        await asyncio.sleep(150)
        assert not any(each.done() for each in asked[-2:])
        done: Counter[str] = Counter()
        for _, batch in session.batches:
            for client, tokens in batch:
                done[client] += tokens
        return done

    done = in_queue(story, max_tokens=10**9)
    shares = [done[client] / sum(done.values()) for client in ("many", "one", "long")]
    assert min(shares) > 0.3, shares


def test_requests_of_one_client_take_turns_too() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> float:
        load = asyncio.ensure_future(ask("same", *[600] * 30, within_s=1e6))
        await asyncio.sleep(0.3)
        seconds = await waited(ask("same", 10, within_s=1e6))
        assert not load.done()
        return seconds

    assert in_queue(story) < 1.0, "the text that runs, and its own batch"


def test_a_short_text_shares_its_batch_with_no_batch_full_of_another_client() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> list[tuple[str, int]]:
        await asyncio.gather(ask("good", 10), ask("bad", *[11] * 200))
        return session.batches[2][1]

    found = Counter(client for client, _ in in_queue(story, max_wait_s=0.01))
    assert found["good"] == 1
    assert 0 < found["bad"] <= 2


def test_batches_take_about_a_quarter_of_a_second_where_texts_are_shorter() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> list[int]:
        await ask("one", *[20] * 300)
        return [len(batch) for _, batch in session.batches[3:-1]]

    # 20 tokens take 20.4 ms.
    assert set(in_queue(story)) <= {12, 13}


def test_a_client_is_a_host_or_a_network_that_one_host_has() -> None:
    assert client_of("192.0.2.7") != client_of("192.0.2.8")
    assert client_of("::ffff:192.0.2.7") == client_of("192.0.2.7")
    assert client_of("2001:db8::1") == client_of("2001:db8:0:0:9::2") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == client_of("fe80::1")
    assert client_of("/run/server.sock") == "/run/server.sock"


# Admission


class Asked(NamedTuple):
    """How requests ended; the seconds of those that were answered, sorted; and what they took of what was possible."""

    ends: Counter[str]
    seconds: list[float]
    part: float


def at_random_times(
    factor: float,
    weights: Sequence[int],
    *,
    timeouts: int,
    texts: tuple[int, int] = (1, 30),
    sessions: int = 1,
    slower: float = 1.0,
) -> Asked:
    """Requests of texts of 10 to 200 tokens, at `factor` times the rate that sessions can answer.

    Args:
        weights: how often each client asks.
        timeouts: the time, in timeouts.
        texts: least and most texts of a request.
        slower: factor by which the machine is slower in every second half of a timeout.
    """
    seconds, draw = timeouts * TIMEOUT, random.Random(0)
    mean_seconds = sum(texts) / 2 * (105 + (105**2 + 190**2 / 12) / 1000) / RATE

    async def story(queue: TextQueue, session: Session, ask: Ask) -> Asked:
        ends: Counter[str] = Counter()
        asked_s, done_s = [0.0], [0.0]
        waited_s: list[float] = []

        async def one(tokens: list[int], client: str) -> None:
            needed, began = sum(map(seconds_of, tokens)), now()
            asked_s[0] += needed
            try:
                await ask(client, *tokens)
            except OverloadedError:
                ends["refused"] += 1
            except TimeoutError:
                ends["late"] += 1
            else:
                ends["answered"] += 1
                waited_s.append(now() - began)
                done_s[0] += needed if now() <= seconds else 0.0

        asked = []
        while (at := now() + draw.expovariate(sessions * factor / mean_seconds)) < seconds:
            await asyncio.sleep(at - now())
            session.slower = slower if int(2 * at / TIMEOUT) % 2 else 1.0
            tokens = [draw.randint(10, 200) for _ in range(draw.randint(*texts))]
            asked.append(asyncio.ensure_future(one(tokens, f"client {draw.choices(range(len(weights)), weights)}")))
        await asyncio.gather(*asked)
        return Asked(ends, sorted(waited_s), done_s[0] / min(asked_s[0], sessions * seconds))

    asked: Asked = in_queue(story, sessions=[None] * sessions)
    return asked


@pytest.mark.parametrize(
    ("factor", "clients", "sessions"),
    [*((factor, clients, 1) for factor in (0.5, 1, 2, 5) for clients in (1, 4)), (2, 4, 2)],
)
def test_at_any_rate_of_requests_what_is_accepted_is_answered_and_that_is_what_the_sessions_can(
    factor: float, clients: int, sessions: int
) -> None:
    asked = at_random_times(factor, [1] * clients, timeouts=20 // sessions, sessions=sessions)
    assert asked.ends["late"] == 0
    assert asked.ends["answered"] > 0
    assert asked.part >= 0.9
    assert factor == 1 or bool(asked.ends["refused"]) == (factor > 1)


def test_requests_of_one_size_are_answered_within_the_time_that_admission_has_estimated() -> None:
    asked = at_random_times(2, [1], timeouts=10, texts=(8, 8))
    assert asked.ends["refused"] > 0
    assert asked.seconds[int(0.9 * len(asked.seconds))] <= 0.65 * TIMEOUT
    assert asked.part >= 0.9


def test_on_a_machine_that_is_slower_at_times_accepted_requests_of_clients_that_ask_more_are_not_late() -> None:
    asked = at_random_times(5, [8, 2, 1, 1], timeouts=10, texts=(2, 2), slower=1.6)
    assert asked.ends["refused"] > asked.ends["answered"] > 0
    assert asked.ends["late"] == 0


def test_a_request_of_one_long_text_is_no_faster_with_more_sessions() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> None:
        await ask("client", 3000)
        # 16 seconds at that rate, whatever the other sessions do.
        with pytest.raises(RequestTooLargeError):
            await ask("client", 4000, within_s=15)
        await ask("client", *[3000] * 4)

    in_queue(story, sessions=[None] * 4)


def test_of_many_requests_at_once_those_that_fit_are_answered_and_the_others_hear_when_to_come_again() -> None:
    """Sixty-four requests of thirty texts, with a timeout of thirty seconds; those that come again are accepted."""

    async def story(queue: TextQueue, session: Session, ask: Ask) -> tuple[int, int]:
        refused = [0]

        async def until_answered() -> None:
            for _ in range(200):
                try:
                    return await ask("client", *[60] * 30)
                except OverloadedError as error:
                    refused[0] += 1
                    await asyncio.sleep(error.retry_after)
            raise AssertionError("never accepted")

        await asyncio.gather(*(until_answered() for _ in range(64)))
        return refused[0], len(session.batches)

    refused, _ = in_queue(story)
    assert refused > 0


def test_after_the_seconds_of_retry_after_a_request_is_accepted_and_not_much_before() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> None:
        asked, error = await filled(ask, "client", *[200] * 10)
        assert f"Send the request again after {error.retry_after} seconds" in str(error)
        await asyncio.sleep(error.retry_after - 2)
        with pytest.raises(OverloadedError):
            await ask("client", *[200] * 10)
        # A second is a batch's, which counts until it has run.
        await asyncio.sleep(3)
        await asyncio.gather(ask("client", *[200] * 10), *asked)

    in_queue(story)


def test_a_clients_backlog_leaves_room_and_time_to_others() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> None:
        asked, _ = await filled(ask, "bad", *[300] * 5)
        await ask("good", 10)
        await asyncio.gather(ask("good", *[300] * 5), *asked)

    in_queue(story)
    # The same where the tokens that wait are the limit.
    in_queue(story, max_tokens=12000)


def test_a_single_request_that_fits_is_accepted_and_short_texts_of_others_make_it_not_late() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> None:
        await ask("bulk", *[300] * 2)
        bulk = asyncio.ensure_future(ask("bulk", *[300] * 60))

        async def ask_again_and_again(number: int) -> None:
            while not bulk.done():
                await ask(f"client {number}", 100)

        asking = [asyncio.create_task(ask_again_and_again(number)) for number in range(3)]
        await bulk
        await asyncio.gather(*asking)

    in_queue(story)


def test_what_never_fits_is_refused_by_another_error_once_the_rate_is_known() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> None:
        await ask("client", 300)
        with pytest.raises(RequestTooLargeError, match="Send fewer texts in a request, or start the server with"):
            await ask("client", *[300] * 200)
        assert queue.tokens == 0
        await ask("client", *[300] * 20)

    in_queue(story)


def test_before_the_first_batch_a_client_waits_with_more_than_two_batches_and_is_not_refused() -> None:
    session = Session()

    async def story() -> int:
        loop = asyncio.get_running_loop()
        queue = TextQueue(batch_tokens=100, max_tokens=10**6, max_wait_s=0.0, clock=loop.time)
        running = asyncio.create_task(queue.run())
        texts = [Text(text="ab" * 50, text_pair="client")] * 3
        asked = [
            asyncio.create_task(queue.answer(session, "task", texts, client="one", within_s=TIMEOUT))  # type: ignore[arg-type]
            for _ in range(5)
        ]
        await asyncio.sleep(0.01)
        waiting = queue.tokens
        await asyncio.gather(*asked)
        running.cancel()
        queue.close()
        return waiting

    assert in_virtual_time(story(), session.seconds) <= 200


def test_a_machine_that_gets_slower_is_late_for_few_and_accepts_less() -> None:
    async def story(queue: TextQueue, session: Session, ask: Ask) -> Counter[str]:
        ends: Counter[str] = Counter()

        async def one() -> None:
            try:
                await ask("client", *[100] * 5)
            except OverloadedError:
                ends["refused"] += 1
            except TimeoutError:
                ends["late"] += 1
            else:
                ends["answered"] += 1

        asked = []
        for number in range(600):
            session.slower = 1.5 if number >= 300 else 1.0
            asked.append(asyncio.ensure_future(one()))
            await asyncio.sleep(0.275)
        await asyncio.gather(*asked)
        return ends

    ends = in_queue(story)
    assert ends["late"] == 0
    assert ends["answered"] > 200


# A server


@pytest.fixture
def bundle(new_bundle: Callable[..., Path]) -> Path:
    return new_bundle()


def test_a_servers_short_text_waits_for_no_batch_of_another_client(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, go = threading.Event(), threading.Event()
    real = TextInference.run_chunks

    def run_chunks(self: TextInference, chunks: Any) -> None:
        if len(chunks) > 1:
            runs.set()
            assert go.wait(30)
        real(self, chunks)

    monkeypatch.setattr(TextInference, "run_chunks", run_chunks)
    with command(bundle) as (client, _), ThreadPoolExecutor(1) as pool:

        def ask(address: str, texts: int) -> int:
            headers = {"X-Forwarded-For": address}
            return client.post("/v1/embeddings", json={"input": ["read"] * texts}, headers=headers).status_code

        try:
            bad = pool.submit(ask, "192.0.2.1", 20)
            assert runs.wait(30)
            assert ask("192.0.2.2", 1) == 200
            assert not bad.done()
        finally:
            go.set()
        assert bad.result() == 200


def test_a_server_refuses_at_once_what_it_cannot_answer_in_time_and_answers_the_rest(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, go = threading.Event(), threading.Event()
    real = TextInference.run_chunks

    def run_chunks(self: TextInference, chunks: Any) -> None:
        runs.set()
        assert go.wait(30)
        real(self, chunks)

    with command(bundle, "--timeout", "60") as (client, _), ThreadPoolExecutor(8) as pool:

        def ask(texts: int = 20) -> Any:
            return client.post("/v1/embeddings", json={"input": ["read"] * texts})

        assert ask().status_code == 200
        # A second for three tokens: a request takes twenty.
        monkeypatch.setattr(Rate, "seconds", lambda self, work: work.total() / 3)
        monkeypatch.setattr(TextInference, "run_chunks", run_chunks)
        try:
            first = pool.submit(ask)
            assert runs.wait(30)
            refused = ask()
            assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (429, True)
            said = refused.json()["error"]
            assert said["type"] == "rate_limit_error"
            assert f"again after {refused.headers['retry-after']} seconds" in said["message"]
            large = ask(100)
            assert (large.status_code, "--timeout" in large.json()["error"]["message"]) == (413, True)
        finally:
            go.set()
        assert first.result().status_code == 200
        assert ask().status_code == 200
