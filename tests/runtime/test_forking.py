"""A session from before a fork is refused in the fork, which can load bundles and end normally."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hdruntime.backends import forking
from hdruntime.backends.forking import no_fork
from support.needs import needs_openvino
from support.recurrent_bundle import make_streaming_bundle
from support.waiting import wait_until

PARENT = """
import os, signal, sys, threading
import hdruntime

path = sys.argv[1]
BATCH = {"input_ids": [[2, 4, 3]] * 8}
session = hdruntime.load(path, "onnxruntime", threads=4)
batches = session.run_batches(session.tokenize(["long", "documents are read"]), batch_tokens=1)
next(batches)
stream = session.stream([4] * 30, segment=5)
next(stream)


def child():
    signal.alarm(20)  # a hang ends it
    for use in (
        lambda: session(**BATCH),
        lambda: session.embed(["long"]),
        lambda: next(batches),
        lambda: next(stream),
        lambda: session.batch_tokens,
        lambda: session.most_rows(4),
    ):
        try:
            use()
        except hdruntime.BackendError as error:
            print(str(error).replace(str(os.getppid()), "PARENT"), flush=True)
    print(session.padding.tokens > 0, flush=True)
    batches.close()
    stream.close()
    session.close()
    with hdruntime.load(path, "onnxruntime", threads=4) as another:
        print(another(**BATCH)["last_hidden_state"].shape, flush=True)


stop = threading.Event()


def work():
    while not stop.is_set():
        session(**BATCH)


worker = threading.Thread(target=work)
worker.start()
pid = os.fork()
if pid == 0:
    child()
    sys.exit(0)  # with all that Python does at its end
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
stop.set()
worker.join()
print("parent", code, session(**BATCH)["last_hidden_state"].shape, len(list(stream)))
"""

REFUSAL = """\
This session was loaded in another process (PARENT), and this one is a fork of it; a fork copies neither threads nor \
GPU contexts.
Load the bundle in this process, or do not fork: multiprocessing.get_context("spawn").
"""


def test_a_session_is_refused_in_a_fork_and_its_parent_continues(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(bundle)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == REFUSAL * 6 + "True\n(8, 3, 4)\nparent 0 (8, 3, 4) 5\n", done.stderr


COMPUTING = """
import os, signal, sys, threading
import hdruntime

path = sys.argv[1]
BATCH = {"input_ids": [[5, 6, 7]] * 8}
session = hdruntime.load(path, "openvino", threads=2)
stop = threading.Event()


def work():
    while not stop.is_set():
        session(**BATCH)


worker = threading.Thread(target=work)
worker.start()
codes = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a hang ends it
        session.close()
        with hdruntime.load(path, "openvino", threads=2) as another:
            print(another(**BATCH)["last_hidden_state"].shape, flush=True)
        sys.exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.set()
worker.join()
print(*codes)
"""


@needs_openvino
def test_forks_of_a_process_that_computes_in_openvino_load_bundles_and_end(
    openvino_bundles: Callable[..., Any],
) -> None:
    """Without `no_fork` five of eight runs of this had a fork that waited for ever."""
    command = [sys.executable, "-c", COMPUTING, str(openvino_bundles("bert").path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "(8, 3, 32)\n" * 3 + "0 0 0\n", done.stderr


def in_a_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_fork_waits_for_the_blocks_of_other_threads_and_no_block_begins_before_it_is_taken() -> None:
    happened: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        with no_fork():
            begun.set()
            may_end.wait(30)
            with no_fork():  # one block inside of another does not wait
                happened.append("computed")

    def fork() -> None:
        if (pid := os.fork()) == 0:
            os._exit(0)
        happened.append("forked")
        os.waitpid(pid, 0)

    def compute_later() -> None:
        with no_fork():
            happened.append("computed later")

    computing = in_a_thread(compute)
    assert begun.wait(30)
    fork_ = in_a_thread(fork)
    wait_until(lambda: forking._forking == 1)
    later = in_a_thread(compute_later)
    time.sleep(0.1)
    assert not happened
    may_end.set()
    for thread in (computing, fork_, later):
        thread.join(30)
    assert happened == ["computed", "forked", "computed later"]
    assert not forking._computing


def test_a_thread_may_fork_in_its_own_block_and_the_fork_computes() -> None:
    with no_fork():
        if (pid := os.fork()) == 0:
            with no_fork():
                os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
