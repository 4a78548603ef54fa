#!/usr/bin/env bash
# Library: Python 3.11 (asyncio), uvloop 0.23.0
# Guess: asyncio sends small writes at once (TCP_NODELAY) on every TCP connection.
# Happens: only where the socket says that its protocol is TCP. On a server's socket that a program made in the usual way,
#   `socket.create_server` among them, the protocol is 0, connections have no TCP_NODELAY, and the second small write of an
#   answer waits for the client's delayed acknowledgement: 45 ms for an answer on Linux, in place of 0.05. asyncio's own sockets
#   (`start_server(host=..., port=...)`) and those made with IPPROTO_TCP are right; uvloop sets it always.
# Minded: runtime/hdruntime/serve/server.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uvloop==0.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import socket
import statistics
import sys
import time

import uvloop


async def observed(**listen):
    """Whether connections have the option, and the milliseconds of an answer of two writes."""

    async def answer(reader, writer):
        settings.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        while await reader.readline():
            writer.write(b"head\n")
            await asyncio.sleep(0)
            writer.write(b"body\n")
        writer.close()
        closed.set()

    settings, closed, times = [], asyncio.Event(), []
    async with await asyncio.start_server(answer, **listen) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for _ in range(20):
            before = time.perf_counter()
            writer.write(b"question\n")
            assert [await reader.readline(), await reader.readline()] == [b"head\n", b"body\n"]
            times.append(time.perf_counter() - before)
        writer.close()
        await closed.wait()
    return bool(settings[0]), round(statistics.median(times) * 1000, 2)


def with_protocol():
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.bind(("127.0.0.1", 0))
    return made


for name, factory in (("asyncio", asyncio.new_event_loop), ("uvloop", uvloop.new_event_loop)):
    with asyncio.Runner(loop_factory=factory) as runner:
        own = runner.run(observed(host="127.0.0.1", port=0))
        usual = runner.run(observed(sock=socket.create_server(("127.0.0.1", 0))))
        tcp = runner.run(observed(sock=with_protocol()))
    print(name, sys.version.split()[0], "own socket", own, "create_server", usual, "with IPPROTO_TCP", tcp)
    assert (own[0], usual[0], tcp[0]) == (True, name == "uvloop", True)
PYTHON
