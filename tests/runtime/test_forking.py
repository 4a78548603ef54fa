"""A session from before a fork is refused in the fork, which loads bundles in what runs there, and ends normally."""

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

import pytest

from hdruntime.backends import forking
from hdruntime.backends.forking import no_fork
from support.needs import needs_openvino
from support.recurrent_bundle import make_streaming_bundle
from support.waiting import wait_until

HANGS = 600
"""Seconds after which a program that takes a few is given up: no claim about its time."""

PARENT = """
import os, sys, threading
import hdruntime

path = sys.argv[1]
BATCH = {"input_ids": [[2, 4, 3]] * 8}
session = hdruntime.load(path, "onnxruntime", threads=4)
batches = session.run_batches(session.tokenize(["long", "documents are read"]), batch_tokens=1)
next(batches)
stream = session.stream([4] * 30, segment=5)
next(stream)


def child():
    for use in (
        lambda: session(**BATCH),
        lambda: session.embed(["long"]),
        lambda: next(batches),
        lambda: next(stream),
        lambda: session.batch_tokens,
        lambda: session.max_rows(4),
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
        timeout=HANGS,
    )
    assert done.stdout == REFUSAL * 6 + "True\n(8, 3, 4)\nparent 0 (8, 3, 4) 5\n", done.stderr


FORKED_BESIDE_OPENVINO = """
import os, sys, threading
import numpy as np
import hdruntime
from hdruntime.backends.openvino.devices import chosen_device, new_core

path = sys.argv[1]
BATCH = {"input_ids": [[5, 6, 7]] * 8}


def in_a_fork(child):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)  # with all that Python and the libraries do at their end
    assert os.waitpid(pid, 0)[1] == 0


def refused(call):
    try:
        call()
    except hdruntime.BackendError as error:
        return f"{type(error).__name__}: {error}"


def answer(session):
    return session(**BATCH)["last_hidden_state"]


def loads_openvino():
    with hdruntime.load(path, "openvino", threads=2) as session:
        print(session.backend.value, answer(session).shape)


chosen_device(new_core(), None)
in_a_fork(loads_openvino)
session = hdruntime.load(path, "openvino", threads=2)
expected = answer(session)
stop = threading.Event()


def work():
    while not stop.is_set():
        answer(session)


def loads_onnx_runtime():
    refusals = [
        refused(lambda: hdruntime.load(path, **options))
        for options in ({"backend": "openvino"}, {"device": "CPU"}, {"precision": "bfloat16"})
    ]
    print(refusals[0], refusals[1:] == refusals[:1] * 2)
    for options in ({}, {"backend": "onnxruntime"}):
        with hdruntime.load(path, threads=2, device="cpu", **options) as another:
            print(another.backend.value, another.backend_reason, abs(answer(another) - expected).max() < 1e-5)


def child():
    print(refused(lambda: session(**BATCH)).partition("\\n")[2])
    session.close()
    loads_onnx_runtime()
    in_a_fork(loads_onnx_runtime)


worker = threading.Thread(target=work)
worker.start()
in_a_fork(child)
stop.set()
worker.join()
loads_openvino()
"""

WITHOUT_OPENVINO = """\
BackendUnavailableError: openvino cannot run PATH on this machine. This process was forked from a process that ran \
OpenVINO, and a fork has no copy of OpenVINO's threads.
Use the backend onnxruntime, or do not fork: multiprocessing.get_context("spawn"). True
onnxruntime This process was forked from a process that ran OpenVINO, and a fork has no copy of OpenVINO's threads. True
onnxruntime The backend was requested. True
"""


@needs_openvino
def test_a_fork_of_a_process_that_has_run_openvino_is_told_to_use_onnx_runtime_and_does(
    openvino_bundles: Callable[..., Any],
) -> None:
    """A fork of one that has only asked OpenVINO for its devices, which starts no threads, loads it."""
    path = str(openvino_bundles("bert").path)
    command = [sys.executable, "-c", FORKED_BESIDE_OPENVINO, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    in_openvino = "openvino (8, 3, 32)\n"
    own = "Load the bundle in this process with the backend onnxruntime, " + REFUSAL.rpartition("process, ")[2]
    assert done.stdout.replace(path, "PATH") == f"{in_openvino}{own}{WITHOUT_OPENVINO * 2}{in_openvino}", done.stderr


FORKS = 200

MANY_FORKS = """
import collections, os, sys, threading
import hdruntime
from hdruntime.backends.openvino.devices import chosen_device, new_core

path, forks, in_child, *in_parent = sys.argv[1:]
BATCH = {"input_ids": [[5, 6, 7]] * 8}
chosen_device(new_core(), None)
sessions = [hdruntime.load(path, backend, threads=2) for backend in in_parent]
stop = threading.Event()


def work(session):
    while not stop.is_set():
        session(**BATCH)


workers = [threading.Thread(target=work, args=[session]) for session in sessions]
for worker in workers:
    worker.start()
codes = collections.Counter()
for _ in range(int(forks)):
    pid = os.fork()
    if pid == 0:
        for session in sessions:
            session.close()
        with hdruntime.load(path, in_child, threads=2) as another:
            assert another(**BATCH)["last_hidden_state"].shape == (8, 3, 32)
        sys.exit(0)
    codes[os.waitpid(pid, 0)[1]] += 1
stop.set()
for worker in workers:
    worker.join()
print(dict(codes))
"""


@pytest.mark.nightly
@needs_openvino
@pytest.mark.parametrize(
    ("in_parent", "in_child"),
    [
        (["onnxruntime"], "onnxruntime"),
        (["onnxruntime"], "openvino"),
        (["openvino"], "onnxruntime"),
        (["openvino", "onnxruntime"], "auto"),
        ([], "openvino"),
    ],
)
def test_many_forks_load_bundles_and_end(
    in_parent: list[str], in_child: str, openvino_bundles: Callable[..., Any]
) -> None:
    command = [sys.executable, "-c", MANY_FORKS, str(openvino_bundles("bert").path), str(FORKS), in_child, *in_parent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=6 * HANGS)
    assert done.stdout == f"{{0: {FORKS}}}\n", done.stderr


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
