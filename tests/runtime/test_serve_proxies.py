"""A server behind a proxy and for browsers: idle connections, who the client is, a path before all, other origins."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import httpx2
import pytest

from hdruntime.errors import InputError
from hdruntime.serve import ServeOptions, serve
from hdruntime.serve.options import LongTexts
from hdruntime.serve.queue import TextQueue
from hdruntime.serve.server import bound_sockets
from support.serving import PARSERS, Connection, command

ORIGIN = "https://pages.example"


@pytest.fixture
def bundle(new_bundle: Callable[..., Path]) -> Path:
    return new_bundle()


def test_a_small_answer_waits_for_no_acknowledgement_of_the_client() -> None:
    """Without TCP_NODELAY the second part of an answer waits up to 40 ms."""

    async def story(bound: socket.socket) -> int:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(connected, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
            writer.close()
            return await found

    with bound_sockets("127.0.0.1", 0) as (bound,):
        bound.listen()
        assert asyncio.run(story(bound))


def test_the_command_parses_requests_in_c_where_that_is_installed(bundle: Path) -> None:
    pytest.importorskip("httptools", reason="httptools is not installed")
    with command(bundle) as (client, server):
        assert client.get("/health").status_code == 200
        assert "httptools" in server.config.http_protocol_class.__module__


def preflight(client: httpx2.Client, origin: str, headers: str = "authorization,content-type,x-stainless-os") -> Any:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    return client.request("OPTIONS", "/v1/embeddings", headers=asked)


@pytest.mark.parametrize("parser", PARSERS)
def test_connections_idle_for_longer_than_proxies_keep_theirs_and_as_long_as_is_said(bundle: Path, parser: str) -> None:
    with command(bundle) as (client, server):
        assert server.config.timeout_keep_alive > 75
        assert client.get("/health").status_code == 200
    with command(bundle, "--keep-alive", "620") as (_, server):
        assert server.config.timeout_keep_alive == 620
    with command(bundle, "--keep-alive", "0.01", parser=parser) as (client, _), Connection(client) as connection:
        connection.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.answer().status == 200
        assert connection.is_closed()


def test_scripts_of_other_origins_read_answers_only_where_that_is_asked_for(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key")
    key = {"Authorization": "Bearer a key"}
    with command(bundle) as (client, _):
        assert preflight(client, ORIGIN).status_code == 405
        found = client.post("/v1/embeddings", json={"input": "read"}, headers={"Origin": ORIGIN})
        assert (found.status_code, "access-control-allow-origin" in found.headers) == (200, False)
    given = ["--api-key-file", str(tmp_path / "key"), "--cors-origin", ORIGIN, "--cors-origin", "http://localhost:3000"]
    with command(bundle, *given) as (client, _):
        for origin in (ORIGIN, "http://localhost:3000"):
            allowed = preflight(client, origin)
            assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
            assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
            assert "POST" in allowed.headers["access-control-allow-methods"]
            for headers, status in ((key, 200), ({}, 401)):
                found = client.post("/v1/embeddings", json={"input": "read"}, headers=headers | {"Origin": origin})
                assert (found.status_code, found.headers["access-control-allow-origin"]) == (status, origin)
        for origin in ("https://other.example", "https://pages.example.other", "null"):
            refused = preflight(client, origin)
            assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
            found = client.post("/v1/embeddings", json={"input": "read"}, headers=key | {"Origin": origin})
            assert "access-control-allow-origin" not in found.headers
    with command(bundle, "--api-key-file", str(tmp_path / "key"), "--cors-origin", "*") as (client, _):
        assert preflight(client, ORIGIN).headers["access-control-allow-origin"] == "*"
        found = client.post("/v1/embeddings", json={"input": "read"}, headers=key | {"Origin": ORIGIN})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("truncate", get_args(LongTexts))
def test_the_commands_default_for_long_texts_is_served_and_scripts_read_what_was_truncated(
    bundle: Path, truncate: str
) -> None:
    with command(bundle, "--truncate", truncate, "--cors-origin", ORIGIN) as (client, _):
        found = client.post("/v1/embeddings", json={"input": ["read", "read " * 50]}, headers={"Origin": ORIGIN})
        assert found.status_code == (400 if truncate == "error" else 200)
        assert found.headers.get("x-truncated-inputs") == ("1" if truncate == "end" else None)
        assert "X-Truncated-Inputs" in found.headers["access-control-expose-headers"]


def test_a_prefix_that_a_proxy_passes_on_or_cuts_off_is_served(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key")
    with command(bundle, "--root-path", "/a/b", "--api-key-file", str(tmp_path / "key")) as (client, _):
        for prefix in ("", "/a/b"):
            assert client.get(f"{prefix}/health").status_code == 200
            assert client.post(f"{prefix}/v1/embeddings", json={"input": "read"}).status_code == 401
            headers = {"Authorization": "Bearer a key"}
            assert client.post(f"{prefix}/v1/embeddings", json={"input": "read"}, headers=headers).status_code == 200
        for path in ("/a/health", "/a/bb/health", "/a/b/a/b/health"):
            assert client.get(path).status_code == 404
        assert "POST /a/b/v1/embeddings" in client.get("/a/b/nowhere").json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "believed"),
    [([], True), (["--forwarded-allow-ips", "10.0.0.0/8,::1"], False), (["--forwarded-allow-ips", "*"], True)],
)
def test_a_proxy_that_is_trusted_says_who_the_client_is(
    bundle: Path, options: list[str], believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[str] = []
    real = TextQueue.answer

    def answer(self: Any, *given: Any, client: str, **options: Any) -> Any:
        clients.append(client)
        return real(self, *given, client=client, **options)

    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    monkeypatch.setattr(TextQueue, "answer", answer)
    with command(bundle, *options) as (client, _):
        headers = {"X-Forwarded-For": "192.0.2.7"}
        assert client.post("/v1/embeddings", json={"input": "read"}, headers=headers).status_code == 200
    assert clients == ["192.0.2.7" if believed else "127.0.0.1"]


def test_what_no_proxy_and_no_browser_sends_is_refused(tmp_path: Path) -> None:
    for origin in ("example.com", "https://a.example/", "https://a.example/b", "https://A.example", "https://a:b", ""):
        with pytest.raises(InputError, match=r"cors_origin is .*\n.*https://example.com"):
            ServeOptions(cors_origin=(ORIGIN, origin)).check()
    for path in ("a", "/", "/a/", "/ä"):
        with pytest.raises(InputError, match=r"root_path is .*\n.*/embeddings"):
            ServeOptions(root_path=path).check()
    ServeOptions(cors_origin=("*", ORIGIN, "http://localhost:3000", "http://[::1]:80"), root_path="/a/b").check()
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"keep_alive is .*; it must be 0.001 or more"):
            serve(tmp_path, options=ServeOptions(keep_alive=seconds))
    for addresses in ("proxy.example", "10.0.0.0/33", "10.0.0.1,", ""):
        with pytest.raises(InputError, match=r"forwarded_allow_ips: .*\n.*10\.0\.0\.0/8"):
            serve(tmp_path, options=ServeOptions(forwarded_allow_ips=addresses))
