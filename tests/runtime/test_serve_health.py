"""What probes of a platform hear, and that a request which fails in any way changes no other one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from fakes.recording_runner import RecordingRunner, answer
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError
from hdruntime.serve import ServeOptions, application
from hdruntime.session import Session
from support.tiny_bundle import make_bundle

Ask = Callable[..., Awaitable[tuple[int, Any]]]

WAITING = 'hdexport_queue_tokens{model="tiny"}'


class Runner(RecordingRunner):
    """A runner that fails as long as it is told to, or waits to be let go; `begun` is set when it runs something."""

    fails: Exception | None = None
    go: threading.Event | None = None
    unheld = 0
    """Tokens of a batch that does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def start(self, inputs: Any, outputs: Any) -> Any:
        self.begun.set()
        if self.go is not None and inputs["input_ids"].size > self.unheld:
            assert self.go.wait(60)
        if self.fails is not None:
            raise self.fails
        return super().start(inputs, outputs)


class Told:
    """An application with its parts, for one event loop.

    Attributes:
        runner, session: of the application, which is `app`.
    """

    def __init__(self, bundle: Path, **options: Any) -> None:
        opened = open_bundle(bundle)
        self.runner = Runner()
        self.session = Session(opened, self.runner)
        self.app = application(opened, self.session, ServeOptions(**options))

    async def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the content of an answer; a GET without a body."""
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://server") as client:
            found = await (client.get(path) if body is None else client.post(path, json=body))
            return found.status_code, found.json() if path != "/metrics" else found.text

    async def embed(self, *texts: str) -> tuple[int, Any]:
        return await self.ask("/v1/embeddings", {"input": [*texts]})

    async def waiting(self, first: str, *others: str) -> list[asyncio.Task[Any]]:
        """Requests of which the first runs and waits to be let go, and the others wait in the queue."""
        self.runner.go = threading.Event()
        asked = [asyncio.create_task(self.embed(first))]
        await asyncio.to_thread(self.runner.begun.wait)
        asked += [asyncio.create_task(self.embed(text)) for text in others]
        while f"{WAITING} {3.0 * len(others)}" not in (await self.ask("/metrics"))[1]:
            await asyncio.sleep(0.001)
        return asked

    async def probes(self) -> tuple[int, int]:
        """The statuses of liveness and readiness, which have reasons."""
        found = [await self.ask(path) for path in ("/health", "/ready")]
        for status, said in found:
            assert said == {"status": "ok"} if status == 200 else said["error"]["message"]
        return found[0][0], found[1][0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("served"))


def expected(*ids: int) -> list[float]:
    return answer(np.array(ids)).mean(0).tolist()


READ = expected(2, 7, 3)


def vector_of(found: tuple[int, Any]) -> Any:
    assert found[0] == 200, found
    return found[1]["data"][0]["embedding"]


def test_readiness_runs_a_text_at_the_start_and_after_a_failure(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle)
        assert told.runner.shapes == []
        assert await told.probes() == (200, 200)
        assert told.runner.shapes == [(1, 3)], "a text of one token"
        assert await told.probes() == (200, 200)
        assert await told.embed("read")
        assert told.runner.shapes == [(1, 3)] * 2, "a text is run again only after a failure"
        told.runner.fails = BackendError("the device is gone")
        assert (await told.embed("read"))[0] == 500
        assert (await told.ask("/ready"))[0] == 503
        assert await told.probes() == (503, 503)
        told.runner.fails = None
        assert await told.probes() == (503, 200), "it is asked again"
        assert await told.probes() == (200, 200)
        assert vector_of(await told.embed("read")) == pytest.approx(READ)

    asyncio.run(story())


def test_a_text_that_fails_alone_makes_no_server_unready(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle)
        assert vector_of(await told.embed("read")) == pytest.approx(READ)
        for text, status in ((".", 500), ("nan", 422)):
            ran = len(told.runner.shapes)
            assert (await told.embed(text))[0] == status
            assert await told.probes() == (200, 200)
            assert (1, 3) in told.runner.shapes[ran + 1 :], "a text was tried"

    asyncio.run(story())


def test_inputs_whose_outputs_are_not_finite_are_named_and_change_no_other_request(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle)
        bad, alone, good = await asyncio.gather(
            told.embed("read", "nan", "long", "nan read"), told.embed("nan"), told.embed("read", "long")
        )
        assert (bad[0], alone[0]) == (422, 422)
        assert bad[1]["error"]["message"] == (
            "input[1], input[3]: The output last_hidden_state holds NaN or infinity. Send the others without them."
        )
        assert alone[1]["error"]["message"] == "input[0]: The output last_hidden_state holds NaN or infinity."
        assert vector_of(good) == pytest.approx(READ)
        status, said = await told.ask("/embed", {"inputs": ["nan", "read"]})
        assert (status, said["error_type"]) == (422, "Backend")
        assert said["error"].startswith("input[0]: ")

    asyncio.run(story())


def test_a_server_that_was_never_ready_is_not_until_a_text_works(bundle: Path) -> None:
    async def story() -> None:
        for failure in (BackendError("no memory"), RuntimeError("a fault of a backend")):
            told = Told(bundle)
            told.runner.fails = failure
            assert (await told.ask("/ready"))[0] == 503
            assert await told.probes() == (503, 503)
            told.runner.fails = None
            assert (await told.ask("/ready"))[0] == 200

    asyncio.run(story())


def test_readiness_waits_for_no_text_of_a_client_and_one_text_serves_all_probes(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle)
        told.runner.go = threading.Event()
        asked = [asyncio.create_task(told.ask("/ready")) for _ in range(5)]
        assert (await told.ask("/health"))[0] == 200, "while the text runs"
        told.runner.go.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 5
        assert told.runner.shapes == [(1, 3)]
        told = Told(bundle)
        told.runner.unheld = 3
        (client,) = await told.waiting("long documents are read")
        assert (await told.ask("/ready"))[0] == 200, "while a text of a client runs"
        told.runner.go.set()
        assert (await client)[0] == 200

    asyncio.run(story())


def test_a_closed_session_is_neither_alive_nor_ready_and_requests_say_so(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle)
        assert await told.probes() == (200, 200)
        told.session.close()
        assert await told.probes() == (503, 503)
        status, said = await told.embed("read")
        assert (status, "The session is closed" in said["error"]["message"]) == (503, True)

    asyncio.run(story())


def test_a_queue_that_has_ended_is_neither_alive_nor_ready_and_requests_say_so(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        told = Told(bundle)
        assert vector_of(await told.embed("read")) == pytest.approx(READ)

        def broken(*given: Any, **options: Any) -> Any:
            raise RuntimeError("a fault of the queue")

        monkeypatch.setattr("hdruntime.serve.fair_queue.FairQueue.take", broken)
        lost = asyncio.create_task(told.embed("read"))
        while (await told.ask("/health"))[0] == 200:
            await asyncio.sleep(0)
        assert await told.probes() == (503, 503)
        assert (await told.embed("read"))[0] == (await lost)[0] == 503

    asyncio.run(story())
    [said] = [record for record in caplog.records if "the queue of texts has ended" in record.getMessage()]
    assert said.exc_info is not None
    assert "a fault of the queue" in str(said.exc_info[1])


def in_fork(story: Callable[[], bytes]) -> bytes:
    """What a fork of this process says."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, story())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as found:
        said = found.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("has_served", [False, True])
def test_a_fork_is_neither_alive_nor_ready_and_hangs_no_request(bundle: Path, has_served: bool) -> None:
    told = Told(bundle)

    async def served() -> None:
        assert vector_of(await told.embed("read")) == pytest.approx(READ)

    async def story() -> str:
        return repr([*await told.probes(), (await told.embed("read"))[0]])

    if has_served:
        asyncio.run(served())
    assert in_fork(lambda: asyncio.run(story()).encode()) == b"[503, 503, 503]"


def lifespan(app: Any) -> list[dict[str, Any]]:
    """What an application says when it is started, and stopped at once."""
    said: list[dict[str, Any]] = []
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def told() -> None:
        async def receive() -> dict[str, Any]:
            return events.pop(0)

        async def send(message: Any) -> None:
            said.append(message)

        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("traceback.format_exc", lambda: "")
        try:
            asyncio.run(told())
        except BackendError as error:
            said.append({"error": str(error)})
    return said


def test_an_application_starts_with_a_text_and_refuses_to_start_where_nothing_would_work(bundle: Path) -> None:
    told = Told(bundle)
    assert [each["type"] for each in lifespan(told.app)] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert told.runner.shapes == [(1, 3)]
    assert "has ended" in lifespan(told.app)[-1]["error"], "it cannot be started again"
    told = Told(bundle)
    told.session.close()
    said = lifespan(told.app)
    assert said[0]["type"] == "lifespan.startup.failed"
    assert "The session is closed" in said[-1]["error"]
    assert "leave out gunicorn --preload" in said[-1]["error"]


def test_an_application_that_is_made_before_a_fork_refuses_to_start_in_the_fork(bundle: Path) -> None:
    """As gunicorn's workers do after ``--preload``."""
    told = Told(bundle)

    def fork() -> bytes:
        said = lifespan(told.app)
        right = said[0]["type"] == "lifespan.startup.failed" and "a fork of it" in said[-1]["error"]
        return b"refused" if right else repr(said).encode()

    assert in_fork(fork) == b"refused"


# Requests that fail beside others


@pytest.fixture(params=["refused", "an error", "a panic"])
def broken_text(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A tokenizer that fails with one text, and the status of a request with that."""
    from hdruntime.errors import InputError
    from hdruntime.text.tokenization import TextTokenizer

    class Panic(BaseException):
        """As tokenizers' own, which is no Exception."""

    real = TextTokenizer.encode
    kind = {"refused": InputError, "an error": RuntimeError, "a panic": Panic}[request.param]

    def encode(self: Any, texts: Any, *given: Any, **options: Any) -> Any:
        if "broken" in texts:
            raise kind("the tokenizer fails")
        return real(self, texts, *given, **options)

    monkeypatch.setattr(TextTokenizer, "encode", encode)
    return 400 if request.param == "refused" else 500


def test_a_text_that_makes_the_tokenizer_fail_changes_no_other_request(bundle: Path, broken_text: int) -> None:
    async def story() -> None:
        told = Told(bundle)
        asked = [told.embed(*(["broken"] if number % 3 == 1 else ["read", "long"])) for number in range(12)]
        for number, found in enumerate(await asyncio.gather(*asked)):
            if number % 3 == 1:
                assert found[0] == broken_text
                assert set(found[1]["error"]) == {"message", "type", "param", "code"}
            else:
                assert vector_of(found) == pytest.approx(READ)
        assert await told.probes() == (200, 200)
        assert vector_of(await told.embed("read")) == pytest.approx(READ)

    asyncio.run(story())


def test_an_exhausted_queue_changes_no_request_that_waits(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle, max_queue_tokens=12)
        asked = await told.waiting("read", "read", "read")
        for _ in range(5):
            assert (await told.embed("read", "read", "long"))[0] == 429, "6 tokens wait, and 9 more are too many"
        assert (await told.ask("/health"))[0] == 200, "a full queue is no fault"
        told.runner.go.set()
        for found in await asyncio.gather(*asked):
            assert vector_of(found) == pytest.approx(READ)
        assert vector_of(await told.embed("read", "read", "long")) == pytest.approx(READ)
        metrics = (await told.ask("/metrics"))[1]
        assert 'status="429"} 5.0' in metrics
        assert f"{WAITING} 0.0" in metrics

    asyncio.run(story())


def test_clients_that_go_change_no_request_that_waits(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle)
        asked = await told.waiting(*["read"] * 9)
        for each in asked[::3]:
            each.cancel()
        told.runner.go.set()
        for number, each in enumerate(asked):
            if number % 3:
                assert vector_of(await each) == pytest.approx(READ)
        assert vector_of(await told.embed("read")) == pytest.approx(READ)
        assert f"{WAITING} 0.0" in (await told.ask("/metrics"))[1]

    asyncio.run(story())


def test_a_request_whose_time_is_over_stops_alone_and_cancels_no_task_around_it(bundle: Path) -> None:
    async def story() -> None:
        told = Told(bundle, timeout=0.5)
        (first,) = await told.waiting("read")
        # Two are asked for while one is watched already; the last one in a task that goes on.
        second = asyncio.create_task(told.embed("read"))
        status, said = await told.embed("read")
        assert (status, "No answer within 0.5 seconds" in said["error"]["message"]) == (503, True)
        task: Any = asyncio.current_task()
        assert not getattr(task, "cancelling", int)()
        assert [(await each)[0] for each in (first, second)] == [503] * 2
        told.runner.go.set()
        assert vector_of(await told.embed("read")) == pytest.approx(READ)
        assert f"{WAITING} 0.0" in (await told.ask("/metrics"))[1]

    asyncio.run(story())
