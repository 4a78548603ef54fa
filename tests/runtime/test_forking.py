"""A session from before a fork is refused in the fork, which can load bundles and end normally."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import chain
from pathlib import Path

import hdruntime
from support.recurrent_bundle import make_streaming_bundle

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


def test_a_fork_can_free_answers_without_a_lock_of_the_backend(tmp_path: Path) -> None:
    with hdruntime.load(make_streaming_bundle(tmp_path / "bundle"), "onnxruntime") as session:
        batch = session(input_ids=[[2, 4, 3]])
        batches = [result.outputs for result in session.run_batches(session.tokenize(["long"]))]
        segments = [segment.outputs for segment in session.stream([4] * 9, segment=5)]
    answers = [*chain.from_iterable(outputs.values() for outputs in (batch, *batches, *segments))]
    assert batches
    assert segments
    assert all(array.flags.owndata for array in answers)
