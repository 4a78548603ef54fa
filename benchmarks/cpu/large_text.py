"""A short text in `hdexport serve`, alone and beside a text of many megabytes of another client.

Usage: python -m benchmarks.cpu.large_text BUNDLE [--megabytes 20] [--truncate end] [--rounds 5]

The server is the installed command, in a process of its own with its defaults. A client asks for a text of 10 words
again and again: first alone, then while another client's large text is sent, read and answered. Printed are the waits
of the short text, and the server's memory before and at its peak.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

_SHORT = json.dumps({"input": "ten words that many clients send again and again today"}).encode()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--truncate", choices=["end", "error", "split"], default="end")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    text = "the river flows through the city, " * (int(options.megabytes * 1e6) // 34)
    large = json.dumps({"input": text, "truncate": options.truncate}).encode()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("hdexport"), "serve", options.bundle, "--port", port]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            print(server.stderr.readline().strip())
            alone = [_asked(port, _SHORT)[0] for _ in range(200)]
            before = _memory(server.pid, "VmRSS")
            beside: list[float] = []
            for _ in range(options.rounds):
                answers: list[tuple[float, int]] = []
                asking = threading.Thread(target=lambda answers=answers: answers.append(_asked(port, large)))
                asking.start()
                while asking.is_alive():
                    beside.append(_asked(port, _SHORT)[0])
                asking.join()
                print(f"the large text: {answers[0][0]:.2f} s, status {answers[0][1]}")
            peak = _memory(server.pid, "VmHWM")
        finally:
            server.send_signal(signal.SIGTERM)
    for name, waits in (("alone", alone), ("beside", beside)):
        told = ", ".join(f"{each:.1f}" for each in 1e3 * np.quantile(waits, [0.5, 0.95, 1.0]))
        print(f"a short text {name}: median, 95 %, longest: {told} ms of {len(waits)}")
    print(f"memory: {before:.0f} MB before, {peak:.0f} MB at the peak")


def _asked(port: int, body: bytes) -> tuple[float, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    began = time.perf_counter()
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    status = connection.getresponse().status
    return time.perf_counter() - began, status


def _memory(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
