"""Nightly: clients that hold connections make nobody wait, and a rolling restart behind nginx loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest

from support.serving import Connection

pytestmark = pytest.mark.nightly

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
TEXT = {"input": "What is read, and by whom?"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(bundle: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """The installed command, ready; it is stopped, if it has not been."""
    command = [Path(sys.executable).with_name("hdexport"), "serve", bundle, "--port", port, "--threads", 1]
    arguments = [*map(str, command), "--backend", "onnxruntime"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            assert "http://" in line, line + server.stderr.read()
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=30) as client:
                while client.get("/ready").status_code != 200:
                    time.sleep(0.1)
            yield server
        finally:
            if server.poll() is None:
                server.terminate()
            server.wait(60)


# Clients that hold connections


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def idle(client: httpx2.Client, opened: contextlib.ExitStack) -> None:
    """A thousand connections on which nothing is sent."""
    for _ in range(1000):
        opened.enter_context(Connection(client))


def half_bodies(client: httpx2.Client, opened: contextlib.ExitStack) -> None:
    """Requests whose bodies stop in the middle."""
    for _ in range(200):
        opened.enter_context(Connection(client)).send(HEAD % 1000 + b'{"input": "' + b"read " * 80)


def slow_readers(client: httpx2.Client, opened: contextlib.ExitStack) -> None:
    """Answers of half a megabyte that nobody reads."""
    body = b'{"input": [%b"read"]}' % (b'"read", ' * 63)
    readers = []
    for _ in range(30):
        reader = opened.enter_context(Connection(client))
        reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.send(HEAD % len(body) + body)
        readers.append(reader)
    for reader in readers:
        # The answer has begun to come.
        assert reader.socket.recv(1, socket.MSG_PEEK)


def byte_by_byte(client: httpx2.Client, opened: contextlib.ExitStack) -> None:
    """Heads and bodies of which a byte comes every second."""
    ended = threading.Event()
    drips = [opened.enter_context(Connection(client)) for _ in range(50)]
    whole = HEAD % 20 + b'{"input": "read it"}'

    def drip() -> None:
        for place in range(len(whole)):
            for number, each in enumerate(drips):
                # Half of them have sent their head.
                sent = HEAD % 20 if number % 2 and not place else whole[place : place + 1]
                with contextlib.suppress(OSError):
                    each.socket.sendall(sent)
            if ended.wait(1):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    opened.callback(thread.join)
    opened.callback(ended.set)


HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


def waits(client: httpx2.Client, seconds: float) -> float:
    """The 95th percentile of the seconds of an answer."""
    ends, found = time.monotonic() + seconds, []
    while time.monotonic() < ends:
        began = time.monotonic()
        # Another client than those that hold connections.
        answer = client.post("/v1/embeddings", json=TEXT, headers={"X-Forwarded-For": "192.0.2.1"})
        assert answer.status_code == 200
        found.append(time.monotonic() - began)
    return float(np.quantile(found, 0.95))


def longer_waits(bundle: Path, attack: Callable[[httpx2.Client, contextlib.ExitStack], None]) -> float:
    """The seconds by which answers take longer while others hold connections; medians of five rounds."""
    port, alone, beside = free_port(), list[float](), list[float]()
    with serving(bundle, port), httpx2.Client(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
        waits(client, 2)
        for _ in range(5):
            alone.append(waits(client, 2))
            with contextlib.ExitStack() as opened:
                attack(client, opened)
                beside.append(waits(client, 2))
        assert client.get("/health").status_code == 200
    typical, held = float(np.median(alone)), float(np.median(beside))
    print(f"{attack.__name__}: 95 % of answers within {typical:.4f} s, and {held:.4f} s beside it")
    return held - typical


@pytest.mark.parametrize("attack", [idle, half_bodies, slow_readers, byte_by_byte])
def test_clients_that_hold_connections_make_nobody_wait(
    sample_bundle: Path, many_files: None, attack: Callable[[httpx2.Client, contextlib.ExitStack], None]
) -> None:
    assert longer_waits(sample_bundle, attack) < 0.1


def test_clients_that_make_others_wait_would_be_seen(sample_bundle: Path) -> None:
    def same_client(client: httpx2.Client, opened: contextlib.ExitStack) -> None:
        """Long texts for some seconds, of the address that the measured client says it has."""
        head = HEAD.replace(b"Host: a", b"Host: a\r\nX-Forwarded-For: 192.0.2.1")
        body = b'{"truncate": "end", "input": [%b"read"]}' % (b'"%b", ' % (b"read " * 400) * 15)
        for _ in range(20):
            opened.enter_context(Connection(client)).send(head % len(body) + body)

    assert longer_waits(sample_bundle, same_client) > 0.1


# A rolling restart


@contextlib.contextmanager
def nginx_before(ports: list[int], folder: Path, **changes: str) -> Iterator[int]:
    """The port of a real nginx with the page's configuration, and other values in it."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not on the PATH: apt-get install nginx-light")
    (site,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    port = free_port()
    site, count = re.subn(r"10\.0\.0\.(\d):8000", lambda match: f"127.0.0.1:{ports[int(match[1]) - 1]}", site)
    assert count == len(ports)
    for old, new in {"listen 80;": f"listen 127.0.0.1:{port};", **changes}.items():
        assert old in site
        site = site.replace(old, new)
    paths = "".join(f"{kind}_temp_path {kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 1; pid nginx.pid; error_log error.log; "
        f"events {{ worker_connections 512; }} http {{ access_log off; {paths} {site} }}"
    )
    arguments = [program, "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
    with subprocess.Popen(arguments) as process:
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait(30)


async def open_loop(port: int, ended: threading.Event, *, per_second: float = 40) -> Counter[str]:
    """The statuses, or the errors, of requests that are sent at their time, whether others are answered or not."""
    found: Counter[str] = Counter()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits, verify=False
    ) as client:

        async def ask() -> None:
            try:
                found[str((await client.post("/v1/embeddings", json=TEXT)).status_code)] += 1
            except httpx2.TransportError as error:
                found[type(error).__name__] += 1

        async with asyncio.TaskGroup() as group:
            began, sent = time.monotonic(), 0
            while not ended.is_set():
                group.create_task(ask())
                sent += 1
                await asyncio.sleep(max(0.0, began + sent / per_second - time.monotonic()))
    return found


def restarted(bundle: Path, folder: Path, stop: signal.Signals, **changes: str) -> Counter[str]:
    """What an open-loop client gets while two servers behind nginx are stopped and started again, one by one."""
    ports, ended = [free_port(), free_port()], threading.Event()
    found: list[Counter[str]] = []
    with contextlib.ExitStack() as exits:
        servers = [exits.enter_context(serving(bundle, port)) for port in ports]
        port = exits.enter_context(nginx_before(ports, folder, **changes))
        client = threading.Thread(target=lambda: found.append(asyncio.run(open_loop(port, ended))))
        client.start()
        try:
            time.sleep(2)
            for server, its_port in zip(servers, ports, strict=True):
                server.send_signal(stop)
                server.wait(60)
                exits.enter_context(serving(bundle, its_port))
                time.sleep(1)
        finally:
            ended.set()
            client.join()
    return found[0]


def test_a_rolling_restart_behind_nginx_loses_no_request(sample_bundle: Path, tmp_path: Path) -> None:
    found = restarted(sample_bundle, tmp_path, signal.SIGTERM)
    print(dict(found))
    assert set(found) == {"200"}, (found, (tmp_path / "error.log").read_text()[-3000:])
    assert found["200"] > 100


def test_a_restart_without_a_second_try_would_be_seen(sample_bundle: Path, tmp_path: Path) -> None:
    """Servers that are killed, and a proxy that tries once: the client sees it."""
    changes = {"proxy_next_upstream error timeout http_503 non_idempotent;": "proxy_next_upstream off;"}
    found = restarted(sample_bundle, tmp_path, signal.SIGKILL, **changes)
    assert found["200"] > 100
    assert found["502"] > 0, found
