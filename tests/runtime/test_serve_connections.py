"""Connections that say nothing, too slowly or too much: the server closes them, says so once, and stays healthy."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from hdruntime.serve import connections
from hdruntime.serve.connections import HEAD_BYTES
from support.serving import PARSERS, Connection, command

FILES = 64

SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))
if {loop!r} == "asyncio":
    sys.modules["uvloop"] = None
from hdexport.cli import main
sys.exit(main(["serve", {bundle!r}, "--port", "0", "--threads", "1", "--backend", "onnxruntime"]))
"""

Served = tuple[httpx2.Client, uvicorn.Server]


@pytest.fixture(scope="module", params=PARSERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from support.tiny_bundle import make_bundle

    folder = tmp_path_factory.mktemp("served")
    (folder / "key").write_text("a key")
    bundle = make_bundle(folder)
    with command(bundle, "--api-key-file", str(folder / "key"), parser=request.param) as both:
        yield both


@pytest.fixture
def bundle(new_bundle: Callable[..., Path]) -> Path:
    return new_bundle()


def head_of(size: int, *, lines: int = 1) -> bytes:
    """A request of about so many bytes, in so many headers."""
    value = b"a" * (size // lines)
    return b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + b"X-A: %b\r\n" % value * lines + b"\r\n"


@pytest.mark.parametrize("lines", [1, 50])
@pytest.mark.parametrize("bytes_at_a_time", [None, 4096])
def test_a_head_of_at_most_64_kib_is_read_and_a_longer_one_refused_before_the_key_is_asked_for(
    served: Served, lines: int, bytes_at_a_time: int | None
) -> None:
    for size, status in ((HEAD_BYTES - 1500, 401), (HEAD_BYTES + 1500, 431)):
        with Connection(served[0]) as connection:
            connection.send(head_of(size, lines=lines), bytes_at_a_time=bytes_at_a_time)
            answer = connection.answer()
            assert answer.status == status
            if status == 431:
                assert answer.headers["connection"] == "close"
                assert b"65536 bytes" in answer.body
                assert connection.is_closed()


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX-A: ", b"GET / HTTP/1.1\r\nX-A"])
def test_a_head_that_never_ends_is_refused_at_that_size(served: Served, start: bytes) -> None:
    """The second one of a connection."""
    with Connection(served[0]) as connection:
        connection.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.answer().status == 200
        connection.send(start + b"a" * (HEAD_BYTES - 100), bytes_at_a_time=4096)
        # The last part alone exceeds the limit: what comes after an answer may lose it.
        connection.send(b"a" * 200)
        assert connection.answer().status == 431
        assert connection.is_closed()


def test_empty_lines_without_end_are_refused(served: Served) -> None:
    with Connection(served[0]) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(HEAD_BYTES // 1024 + 1):
            connection.send(b"\r\n" * 512)
        assert connection.answer().status in (400, 431)


def test_a_body_is_no_head(served: Served) -> None:
    body = b'{"input": "%b"}' % (b"read " * HEAD_BYTES)
    with Connection(served[0]) as connection:
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a key\r\nContent-Length: %d\r\n\r\n"
        for _ in range(2):
            connection.send(head % len(body) + body, bytes_at_a_time=2**15)
            answer = connection.answer()
            assert (answer.status, b"truncate" in answer.body) == (400, True)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("starts", [b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_a_head_that_comes_byte_by_byte_has_the_time_of_an_idle_connection_and_the_log_says_so_once(
    bundle: Path, parser: str, starts: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    connections._warn_once.cache_clear()
    ended = threading.Event()
    with command(bundle, "--keep-alive", "0.3", parser=parser) as (client, _):
        for _ in range(2):
            with Connection(client) as connection:
                if starts:
                    connection.send(starts)
                    assert connection.answer().status == 200
                drip = threading.Thread(target=_drip, args=(connection.socket, ended))
                drip.start()
                # It would never end: each byte is within the time of the one before.
                assert connection.is_closed()
                ended.set()
                drip.join()
                ended.clear()
    said = [record for record in caplog.records if "no whole request" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]


def _drip(sends: socket.socket, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        sends.sendall(b"GET /health HTTP/1.1\r\nX-A: ")
        while not ended.wait(0.05):
            sends.sendall(b"a")


@pytest.mark.skipif(sys.platform == "win32", reason="a limit on open files is one of Unix")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_at_the_limit_of_open_files_health_is_answered_and_the_log_says_it_once(bundle: Path, loop: str) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop", reason="uvloop is not installed")
    program = SERVER.format(files=FILES, loop=loop, bundle=str(bundle))
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            assert "http://127.0.0.1:" in line, line + server.stderr.read()
            url = line.split(": ")[-1].strip()
            with httpx2.Client(base_url=url, timeout=30, verify=False) as client, contextlib.ExitStack() as idle:
                for _ in range(2):
                    for _ in range(FILES):
                        idle.enter_context(Connection(client))
                    for _ in range(5):
                        assert _health(client) == 200
                assert client.post("/v1/embeddings", json={"input": "read"}).status_code == 200
        finally:
            server.terminate()
            server.wait(30)
        said = server.stderr.read()
    assert said.count("connections are open") == 1, said
    assert said.count("files can be opened") <= 1, said
    assert "Traceback" not in said


def _health(client: httpx2.Client) -> int:
    """The status of /health, by a connection of its own; one that is turned away is tried again, as probes do."""
    for _ in range(50):
        with contextlib.suppress(httpx2.TransportError):
            return client.get("/health", headers={"Connection": "close"}).status_code
    raise AssertionError("no answer to 50 connections")


def test_requests_beyond_the_connections_get_503_and_health_is_answered(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 3)
    half = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
    with command(bundle) as (client, server), contextlib.ExitStack() as opened:
        busy = [opened.enter_context(Connection(client)) for _ in range(3)]
        for each in busy:
            each.send(half)
        while len(server.server_state.tasks) < 3:
            time.sleep(0.01)
        with Connection(client) as one:
            one.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = one.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert one.is_closed()
        with Connection(client) as one:
            one.send(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert one.answer().status == 200
        for each in busy:
            each.send(b'"input":')
            assert each.answer().status == 400, "those that were there are answered"


def test_the_head_of_a_response_is_sent_with_its_body(bundle: Path) -> None:
    """One system call and one packet, as seen by the transport of a real server; interim responses do not wait."""
    sent: list[list[bytes]] = []

    class Recorder:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

        def write(self, data: bytes) -> None:
            sent.append([data])
            self._transport.write(data)

        def writelines(self, parts: list[bytes]) -> None:
            sent.append(parts)
            self._transport.writelines(parts)

    made = connections._HeadWithBody.__init__
    with pytest.MonkeyPatch.context() as patch, command(bundle) as (client, _):
        patch.setattr(connections._HeadWithBody, "__init__", lambda self, transport: made(self, Recorder(transport)))
        client.get("/v1/models")
        body = b'{"input": "read"}'
        request = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        with Connection(client) as connection:
            connection.send(request % len(body))
            assert connection.answer().status == 100
            connection.send(body)
            assert connection.answer().status == 200
    (model, interim, embedding) = sent
    for head, *rest in (model, embedding):
        assert (head[:12], head[-4:], len(rest)) == (b"HTTP/1.1 200", b"\r\n\r\n", 1)
    assert interim == [b"HTTP/1.1 100 Continue\r\n\r\n"]
