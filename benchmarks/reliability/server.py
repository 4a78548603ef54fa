"""A server of the installed command, and clients that take little of the machine's time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_JSON = "Content-Type: application/json\r\n"


class Answer(NamedTuple):
    """The answer to a request: its status, its Retry-After, and the seconds that it took."""

    status: int
    retry_after: int
    seconds: float


class Server(NamedTuple):
    """A server's port, and its process."""

    port: int
    process: int

    def cpu_seconds(self) -> float:
        """The CPU time of the process so far."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def served(bundle: Path, *options: str) -> Iterator[Server]:
    """`hdexport serve BUNDLE` in a process of its own, which is ready."""
    command = [sys.executable, "-m", "hdexport", "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            port = int(line.rsplit(":", 1)[1])
            _wait_until_ready(port)
            yield Server(port, server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(40)
            server.kill()


def body_of(texts: Sequence[str]) -> bytes:
    """The body of a request for embeddings."""
    return json.dumps({"input": list(texts), "encoding_format": "base64", "truncate": "end"}).encode()


class Connection:
    """A connection of a client, which a proxy on this machine would name by its address."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: str) -> None:
        self._reader, self._writer, self._client = reader, writer, client

    async def post(self, body: bytes) -> Answer:
        """Send a request, and read the answer."""
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: {self._client}\r\n{_JSON}"
        began = time.perf_counter()
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        await self._reader.readexactly(int(headers["content-length"]))
        return Answer(int(lines[0].split()[1]), int(headers.get("retry-after", 0)), time.perf_counter() - began)


@contextlib.asynccontextmanager
async def connected(port: int, client: str) -> AsyncIterator[Connection]:
    """A connection of a client, an address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
    try:
        yield Connection(reader, writer, client)
    finally:
        writer.close()


def _wait_until_ready(port: int) -> None:
    ends = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as asked:
            asked.sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            if b" 200 " in asked.recv(100):
                return
        assert time.monotonic() < ends, "the server is not ready after 60 seconds"
        time.sleep(0.1)
