"""Requests as bytes on a connection: the answers depend neither on the parser nor on offers of other protocols."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import starlette.routing
import uvicorn

from fakes.recording_runner import RecordingRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import ServeOptions, application, request_reader
from hdruntime.session import Session
from support.serving import PARSERS, Connection, answers_of, command

BODY = json.dumps({"input": "read"}).encode()
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"
WHOLE = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
OFFERS = {
    "Java's HttpClient": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "names in small letters": b"connection: http2-settings,upgrade\r\nhttp2-settings: AAMAAABk\r\nupgrade: h2c\r\n",
    "two lines of Connection": b"Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
    "TLS": b"Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n",
    "several protocols": b"Upgrade: TLS/1.2, h2c, foo/9\r\nConnection: upgrade, keep-alive\r\n",
    "WebSocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eHh4\r\n",
    "no Connection": b"Upgrade: h2c\r\n",
}
ENDINGS = {"Content-Length": POST + b"%b" + WHOLE, "chunked": POST + b"%b" + CHUNKED, "no body": GET + b"%b\r\n"}
Served = tuple[httpx2.Client, uvicorn.Server]


@pytest.fixture(scope="module", params=PARSERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from support.tiny_bundle import make_bundle

    with command(make_bundle(tmp_path_factory.mktemp("served")), parser=request.param) as both:
        yield both


@pytest.fixture
def plain(served: Served) -> dict[str, bytes]:
    """The content of the answer to each request without an offer."""
    found = {}
    for ending, written in ENDINGS.items():
        with Connection(served[0]) as connection:
            connection.send(written.replace(b"%b", b"", 1))
            answer = connection.answer()
            assert answer.status == 200
            found[ending] = answer.body
    return found


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_offer_of_another_protocol_changes_no_answer_and_the_connection_goes_on(
    served: Served, plain: dict[str, bytes], offer: str, ending: str
) -> None:
    written = ENDINGS[ending].replace(b"%b", OFFERS[offer], 1)
    head = written.index(b"\r\n\r\n") + 4
    with Connection(served[0]) as connection:
        for parts in (
            [written],
            [written[:head], written[head:]],
            [written[index : index + 1] for index in range(len(written))],
            # Two and a half requests at once, of which the last comes whole later.
            [written * 2 + written[:9], written[9:]],
        ):
            for part in filter(None, parts):
                connection.send(part)
            for _ in range(b"".join(parts).count(written)):
                answer = connection.answer()
                assert (answer.status, answer.body) == (200, plain[ending])
        # Without an offer, on the same connection.
        connection.send(POST + WHOLE)
        assert connection.answer().body == plain["Content-Length"]


def test_many_offers_at_once_are_answered_in_turn(served: Served) -> None:
    number = 2000
    with Connection(served[0]) as connection:
        written = (GET + OFFERS["Java's HttpClient"] + b"\r\n") * number
        sending = threading.Thread(target=connection.send, args=(written,))
        sending.start()
        assert [connection.answer().status for _ in range(number)] == [200] * number
        sending.join()


@pytest.mark.parametrize("offer", [b"", *OFFERS.values()])
def test_a_client_that_waits_for_100_continue_hears_it(served: Served, plain: dict[str, bytes], offer: bytes) -> None:
    with Connection(served[0]) as connection:
        for _ in range(2):
            head, _, body = WHOLE.partition(b"\r\n\r\n")
            connection.send(POST + offer + b"Expect: 100-continue\r\n" + head + b"\r\n\r\n")
            assert connection.answer().status == 100
            connection.send(body)
            assert connection.answer()[::2] == (200, plain["Content-Length"])


def test_errors_are_those_of_a_request_without_an_offer(served: Served) -> None:
    offer = OFFERS["Java's HttpClient"]
    nowhere = b"POST /nowhere HTTP/1.1\r\nHost: a\r\n%bContent-Length: 2\r\n\r\n{}"
    wrong = POST + b"%bContent-Length: 2\r\n\r\n{}"
    for written in (nowhere, wrong):
        with Connection(served[0]) as connection:
            found = []
            for each in (b"", offer):
                connection.send(written.replace(b"%b", each, 1))
                found.append(connection.answer()[::2])
            assert found[0] == found[1]
            assert found[0][0] in (400, 404)


@pytest.mark.parametrize(
    "written",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n",
        b"GET health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://a HTTP/1.1\r\nHost: a\r\n\r\n",
        b"no HTTP at all\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n",
        POST + OFFERS["TLS"] + b"Content-Length: five\r\n\r\n",
        POST + OFFERS["TLS"] + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
)
def test_what_is_no_request_of_http_1_is_refused_and_the_connection_closed(served: Served, written: bytes) -> None:
    with Connection(served[0]) as connection:
        connection.send(written)
        answer = connection.answer()
        assert answer.status == 400
        assert connection.is_closed()


@pytest.mark.parametrize(("path", "status"), [(b"/health", 200), (b"/v1/embeddings", 405), (b"/nowhere", 404)])
def test_a_request_for_the_head_alone_gets_it_and_the_connection_goes_on(
    served: Served, plain: dict[str, bytes], path: bytes, status: int
) -> None:
    with Connection(served[0]) as connection:
        connection.send(b"HEAD %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.socket.recv(1)
        assert int(head.split()[1]) == status
        connection.send(GET + b"\r\n")
        assert connection.answer()[::2] == (200, plain["no body"])


def test_a_body_that_is_compressed_is_refused_by_its_name(served: Served) -> None:
    for coding, status in (("gzip", 415), ("identity", 200)):
        answer = served[0].post("/v1/embeddings", content=BODY, headers={"Content-Encoding": coding})
        assert answer.status_code == status, answer.text
        assert (coding in answer.text) == (status == 415)


def test_empty_lines_before_a_request_are_ignored(served: Served, plain: dict[str, bytes]) -> None:
    with Connection(served[0]) as connection:
        for _ in range(2):
            connection.send(b"\r\n\r\n" + GET + b"\r\n")
            assert connection.answer()[::2] == (200, plain["no body"])


@pytest.mark.parametrize("offer", [b"", OFFERS["Java's HttpClient"]])
def test_a_request_as_a_proxy_gets_it_is_answered(served: Served, plain: dict[str, bytes], offer: bytes) -> None:
    with Connection(served[0]) as connection:
        for origin in (b"http://a", b"HTTPS://user@[::1]:80"):
            connection.send(GET.replace(b"/health", origin + b"/health?probe=1", 1) + offer + b"\r\n")
            assert connection.answer()[::2] == (200, plain["no body"])
            connection.send(POST.replace(b"/v1", origin + b"/v1", 1) + offer + WHOLE)
            assert connection.answer()[::2] == (200, plain["Content-Length"])
        connection.send(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.answer().status == 404


def test_no_library_for_websockets_is_asked(served: Served) -> None:
    assert served[1].config.ws_protocol_class is None


@pytest.mark.parametrize("parser", PARSERS)
def test_a_body_that_never_comes_does_not_hold_the_servers_end(new_bundle: Callable[..., Path], parser: str) -> None:
    with contextlib.ExitStack() as connections:
        with command(new_bundle(), parser=parser) as (client, _):
            half = [connections.enter_context(Connection(client)) for _ in range(3)]
            half[0].send(POST + WHOLE[:-5])
            half[1].send(POST + CHUNKED[:-9])
            half[2].send(POST[:-9])
            # A whole request afterwards: the server has read the others.
            assert client.post("/v1/embeddings", content=BODY).status_code == 200
        for connection in half[:2]:
            answer = connection.answer()
            assert answer.status == 503
            assert "the request's body has not arrived" in json.loads(answer.body)["error"]["message"]
            assert connection.is_closed()
        assert half[2].is_closed()


def _listens(client: httpx2.Client) -> bool:
    try:
        socket.create_connection((client.base_url.host, client.base_url.port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("parser", PARSERS)
def test_a_body_that_comes_when_the_server_is_stopped_is_answered(
    new_bundle: Callable[..., Path], parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "_BODY_SECONDS", 60.0)
    with command(new_bundle(), parser=parser) as (client, server), Connection(client) as connection:
        connection.send(POST + WHOLE[:-5])
        assert client.post("/v1/embeddings", content=BODY).status_code == 200
        server.should_exit = True
        while _listens(client):
            time.sleep(0.01)
        connection.send(WHOLE[-5:])
        answer = connection.answer()
        assert answer.status == 200
        assert len(json.loads(answer.body)["data"]) == 1
        assert connection.is_closed()


def test_a_route_without_parameters_is_found_without_a_search(
    new_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search takes as much CPU time as tokenizing a short text; other paths have it, and the middleware of CORS."""
    bundle = open_bundle(new_bundle())
    requests = ("/v1/embeddings", {"input": "read"}), ("/v1/models", None), ("/no/route", None)

    async def searched(self: object, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(f"{scope['path']} is searched for")

    monkeypatch.setattr(starlette.routing.Router, "__call__", searched)
    for options, found in ((ServeOptions(), 2), (ServeOptions(cors_origin=("*",)), 0)):
        for number, request in enumerate(requests):
            app = application(bundle, Session(bundle, RecordingRunner()), options)
            if number < found:
                assert answers_of(app, request)[0].status_code == 200
            else:
                with pytest.raises(AssertionError, match="is searched for"):
                    answers_of(app, request)
