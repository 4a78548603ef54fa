"""Servers of the command in this process, with each of uvicorn's parsers, and connections without a client library."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import uvicorn

from hdexport.cli import main
from hdruntime.serve import http_protocols

PARSERS = ("h11", "httptools")


def protocol_of(parser: str) -> Any:
    """The server's protocol with a parser; the test is skipped where the parser is not installed."""
    if parser == "h11":
        return http_protocols.H11WithoutUpgrade
    pytest.importorskip("httptools", reason="httptools is not installed")
    return importlib.import_module("hdruntime.serve.httptools_protocol").HttpToolsWithoutUpgrade


@contextlib.contextmanager
def command(
    bundle: Path | list[str], *options: str, parser: str | None = None
) -> Iterator[tuple[httpx2.Client, uvicorn.Server]]:
    """A client of a real server of the command, and the server, with a parser or the one that the command chooses.

    Args:
        bundle: a bundle, or the command's words for several; with none, and its port, the command has variables.
    """
    words = [*(bundle if isinstance(bundle, list) else [str(bundle)]), *options]
    words += ["--port", "0"] if bundle else []
    servers: list[uvicorn.Server] = []

    class Server(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Server)
        if parser is not None:
            protocol = protocol_of(parser)
            patch.setattr(http_protocols, "http_protocol", lambda: protocol)
        thread = threading.Thread(target=main, args=(["serve", *words],))
        thread.start()
        try:
            while not (servers and servers[0].started):
                assert thread.is_alive()
                time.sleep(0.01)
            port = servers[0].servers[0].sockets[0].getsockname()[1]
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as client:
                yield client, servers[0]
        finally:
            if servers:
                servers[0].should_exit = True
            thread.join()


def answers_of(app: Any, *requests: tuple[str, Any]) -> list[httpx2.Response]:
    """The answers of an application to requests, path and body; a GET for a body of None."""

    async def ask() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            return [
                await (client.get(path) if body is None else client.post(path, json=body)) for path, body in requests
            ]

    return asyncio.run(ask())


def message_of(content: Any) -> str:
    """The message of an error in the form of OpenAI, text-embeddings-inference or Cohere."""
    error = content.get("error", content)
    return str(error if isinstance(error, str) else error["message"])


class Answer(NamedTuple):
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """A connection that sends bytes and reads answers."""

    def __init__(self, client: httpx2.Client) -> None:
        address = (client.base_url.host, client.base_url.port)
        self.socket = socket.create_connection(address, timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes, *, bytes_at_a_time: int | None = None) -> None:
        """Send data, in parts if asked for."""
        step = bytes_at_a_time or len(data)
        for start in range(0, len(data), step):
            self.socket.sendall(data[start : start + step])

    def answer(self) -> Answer:
        """The next answer, whose body has a Content-Length or ends with the connection."""
        head = self._read_until(lambda: self._received.find(b"\r\n\r\n") + 1)
        lines = self._received[:head].decode().strip().split("\r\n")
        self._received = self._received[head + 3 :]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        status = int(lines[0].split()[1])
        if status == 100:
            return Answer(status, headers, b"")
        if "content-length" in headers:
            size = int(headers["content-length"])
            self._read_until(lambda: len(self._received) >= size)
        else:
            size = self._read_all()
        body, self._received = self._received[:size], self._received[size:]
        return Answer(status, headers, body)

    def is_closed(self) -> bool:
        """Whether the server ends the connection without another byte; waits until it does one of both."""
        try:
            return not self._received and not self.socket.recv(1)
        except ConnectionResetError:
            # A byte reached the server after the end.
            return True

    def _read_until(self, found: Any) -> int:
        while not (place := found()):
            block = self.socket.recv(65536)
            assert block, f"the connection ended after {self._received!r}"
            self._received += block
        return int(place)

    def _read_all(self) -> int:
        while block := self.socket.recv(65536):
            self._received += block
        return len(self._received)
