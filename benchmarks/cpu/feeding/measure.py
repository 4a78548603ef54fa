"""Measure one case in this process, which prints what it found: ``python -m benchmarks.cpu.feeding.measure JSON``."""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

import hdruntime
from benchmarks.cpu.feeding.cases import EMBED, ENCODE, JOB, JOBS, TOKENIZERS, Case, Settings
from benchmarks.cpu.feeding.inputs import checkpoint_of, texts_of
from benchmarks.cpu.feeding.stand_in import (
    STAND_IN,
    Pace,
    StandInBackend,
    StandInRunner,
    add_stand_in,
    busy_share,
    padding_share,
)
from benchmarks.cpu.feeding.tables import CORES, width
from benchmarks.cpu.feeding.timeline import COMPUTING, Looking, Span, picture, save, shares
from benchmarks.record import now
from benchmarks.texts import tokenizer_of
from hdexport.bench.measure.calls import environment, timed
from hdruntime.jobs import JobOptions, JobProgress, LocalPool, plan_job, run_job
from hdruntime.text.tokenization import TextTokenizer

_BATCH_TOKENS = (2**14, 2**16, 2**18)
_CLIENTS = 16
_REQUESTS = 2000
_SERVED_CHARACTERS = 10**6
_PEER_BATCH = 32
"""Texts of a batch of sentence-transformers by default."""


def main() -> int:
    """Measure, and print a line of JSON."""
    given = json.loads(sys.argv[1])
    case, settings = Case(*given["case"]), Settings(**given["settings"])
    print(json.dumps(_MEASURED[case.what](case, settings)))
    return 0


def _job(
    case: Case,
    settings: Settings,
    corpus: str,
    *,
    ending: str = "jsonl-parquet",
    batch_tokens: int | None = None,
) -> tuple[JobProgress, float, float]:
    """Run a job; its outcome, and when it began and ended."""
    source, target = ending.split("-")
    backend = STAND_IN if settings.bundle is None else "auto"
    bundle = hdruntime.open_bundle(settings.path / case.bundle if settings.bundle is None else Path(settings.bundle))
    with tempfile.TemporaryDirectory(dir=settings.path) as scratch:
        job_options = JobOptions(batch_tokens=batch_tokens)
        inputs = [settings.path / f"{corpus}.{source}"]
        planned = plan_job(bundle, inputs, Path(scratch) / f"results.{target}", options=job_options)
        with hdruntime.load(bundle, backend) as session:
            began = time.perf_counter()
            done = run_job(planned, LocalPool(session, planned.task, options=planned.options))
            ended = time.perf_counter()
    if done.failed_rows:
        sys.exit(f"{case}: {done.failed_rows} rows failed")
    return done, began, ended


def _repeated(call: Callable[[], object], repeats: int) -> dict[str, Any]:
    times = [timed(call)[1:] for _ in range(repeats)]
    return {"wall_s": [wall / 1e3 for wall, _ in times], "cpu_s": [cpu / 1e3 for _, cpu in times]}


def _cpu(case: Case, settings: Settings) -> dict[str, Any]:
    texts, few = texts_of(settings.path, case.corpus), texts_of(settings.path, f"{case.corpus}-warm")
    bundle = settings.path / case.bundle
    if case.way in JOBS:
        _job(case, settings, f"{case.corpus}-warm", ending=case.way)
        return _repeated(lambda: _job(case, settings, case.corpus, ending=case.way), settings.repeats)
    call: Callable[[list[str]], object]
    if case.way == EMBED:
        call = hdruntime.load(bundle, STAND_IN).embed
    elif case.way == ENCODE:
        call = hdruntime.SentenceEncoder(bundle, backend=STAND_IN).encode
    elif case.way in TOKENIZERS:
        call = getattr(tokenizer_of(bundle / "tokenizer.json"), case.way)
    else:
        call = _preparation(checkpoint_of(settings.path, case.bundle))
    call(few)
    return _repeated(lambda: call(texts), settings.repeats)


def _preparation(checkpoint: Path) -> Callable[[list[str]], None]:
    """Prepare texts as sentence-transformers does before it computes, in batches of its default size."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(checkpoint), device="cpu")

    def prepare(texts: list[str]) -> None:
        texts = sorted(texts, key=len, reverse=True)
        for start in range(0, len(texts), _PEER_BATCH):
            model.preprocess(texts[start : start + _PEER_BATCH])

    return prepare


def _share(case: Case, settings: Settings) -> dict[str, Any]:
    StandInBackend.pace = Pace(settings.tokens_per_second, settings.in_flight)
    found: dict[str, list[float]] = {"share": [], "wall_s": [], "tokens_per_second": []}
    encoder = hdruntime.SentenceEncoder(settings.path / case.bundle, backend=STAND_IN)
    texts = texts_of(settings.path, case.corpus)
    encoder.encode(texts_of(settings.path, f"{case.corpus}-warm"))
    for _ in range(settings.repeats):
        if case.way == JOB:
            _, began, ended = _job(case, settings, case.corpus)
        else:
            _runner().batches.clear()
            began = time.perf_counter()
            encoder.encode(texts)
            ended = time.perf_counter()
        batches = _runner().batches
        found["share"].append(busy_share(batches, ended - began))
        found["wall_s"].append(ended - began)
        found["tokens_per_second"].append(sum(batch.tokens for batch in batches) / (ended - began))
    return found


def _runner() -> StandInRunner:
    return StandInBackend.opened[-1]


def _batches(case: Case, settings: Settings) -> dict[str, Any]:
    session = hdruntime.load(settings.path / case.bundle, STAND_IN) if case.way == EMBED else None
    texts = texts_of(settings.path, case.corpus)
    found = {}
    for batch_tokens in _BATCH_TOKENS:
        if session is None:
            _job(case, settings, case.corpus, batch_tokens=batch_tokens)
        else:
            _runner().batches.clear()
            session.embed(texts, batch_tokens=batch_tokens)
        batches = _runner().batches
        found[str(batch_tokens)] = {
            "batches": len(batches),
            "padding": padding_share(batches),
            "shapes": len({(batch.rows, batch.longest) for batch in batches}),
            "lengths": len({batch.longest for batch in batches}),
        }
    return {"of_batch_tokens": found}


def _serve(case: Case, settings: Settings) -> dict[str, Any]:
    size = int(case.way)
    texts = _first_of(texts_of(settings.path, case.corpus), _SERVED_CHARACTERS)
    bodies = [json.dumps({"input": texts[start : start + size]}) for start in range(0, len(texts), size)][:_REQUESTS]
    command = [sys.executable, "-m", "benchmarks.cpu.feeding.command", "serve", settings.path / case.bundle]
    command += ["--backend", STAND_IN, "--port", "0"]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = int(server.stderr.readline().rsplit(":", 1)[1])
            _ask(port, bodies[: max(_CLIENTS, len(bodies) // 20)])
            times = psutil.Process(server.pid).cpu_times
            runs = []
            for _ in range(settings.repeats):
                before, began = times(), time.perf_counter()
                tokens = _ask(port, bodies)
                wall_s, after = time.perf_counter() - began, times()
                runs.append((after.user + after.system - before.user - before.system, wall_s))
        finally:
            server.send_signal(signal.SIGTERM)
    return {"tokens": tokens, "cpu_s": [cpu for cpu, _ in runs], "wall_s": [wall for _, wall in runs]}


def _first_of(texts: Sequence[str], characters: int) -> list[str]:
    sizes = itertools.accumulate(map(len, texts))
    return [text for text, size in zip(texts, sizes, strict=True) if size <= characters]


def _ask(port: int, bodies: Sequence[str]) -> int:
    """Send the requests by several clients; the tokens of all texts."""
    left = iter(bodies)
    tokens: list[int] = []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        # A list's iterator gives each request to one thread.
        for body in left:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {said[:300]!r}")
            tokens.append(json.loads(said)["usage"]["total_tokens"])

    clients = [threading.Thread(target=client) for _ in range(_CLIENTS)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    if len(tokens) != len(bodies):
        sys.exit(f"{len(tokens)} of {len(bodies)} requests were answered")
    return sum(tokens)


def _cores(case: Case, settings: Settings) -> dict[str, Any]:
    calls: list[list[int]] = []
    encode = TextTokenizer.encode

    @functools.wraps(encode)
    def recorded(self: TextTokenizer, texts: Sequence[str], *arguments: Any, **more: Any) -> Any:
        calls.append(list(map(len, texts)))
        return encode(self, texts, *arguments, **more)

    _job(case, settings, f"{case.corpus}-warm")
    runs = []
    with mock.patch.object(TextTokenizer, "encode", recorded):
        for _ in range(settings.repeats):
            calls.clear()
            before_s, began_s = _cpu_of_other_threads(), time.process_time()
            _job(case, settings, case.corpus)
            others_s = _cpu_of_other_threads() - before_s
            runs.append((time.process_time() - began_s - others_s, others_s))
    if not calls:
        sys.exit(f"{case}: no text was tokenised by TextTokenizer.encode, by whose calls the width is known")
    python_s, others_s = min(runs, key=sum)
    return {
        "python_s": python_s,
        "others_s": others_s,
        "width": width(calls, CORES),
        "padding": padding_share(_runner().batches),
    }


def _cpu_of_other_threads() -> float:
    """CPU seconds of the threads that are not Python's: those of tokenizers and of Arrow, which live on."""
    ours = {thread.native_id for thread in threading.enumerate()}
    return sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id not in ours)


def _stages(case: Case, settings: Settings) -> dict[str, Any]:
    StandInBackend.pace = Pace(settings.tokens_per_second, settings.in_flight)
    _job(case, settings, f"{case.corpus}-warm")
    runs = [_looked_at(case, settings) for _ in range(settings.repeats)]
    done, began, ended, spans = min(runs, key=lambda run: run[2] - run[1])
    if settings.timeline is not None:
        machine = environment()
        where = "on the CPU"
        if settings.bundle is None:
            where = f"a GPU of {settings.tokens_per_second:,.0f} tokens/s, {settings.in_flight} batches in flight"
        about = [
            f"{done.rows} {case.corpus} texts, {done.tokens} tokens, {where}",
            f"{machine['cores']} cores of {machine['cpu']}, {now()[:10]}, commit {machine.get('commit')}",
        ]
        chart = picture(spans, began=began, ended=ended, title="A batch job over time", subtitle=about)
        save(chart, Path(settings.timeline))
    return {"wall_s": ended - began, "shares": shares(spans, began=began, ended=ended)}


def _looked_at(case: Case, settings: Settings) -> tuple[JobProgress, float, float, list[Span]]:
    with Looking() as looking:
        done, began, ended = _job(case, settings, case.corpus)
    spans = looking.spans
    if settings.bundle is None:
        spans += [Span(COMPUTING, batch.began, batch.ended) for batch in _runner().batches]
    return done, began, ended, spans


_MEASURED: Mapping[str, Callable[[Case, Settings], dict[str, Any]]] = {
    "cpu": _cpu,
    "share": _share,
    "batches": _batches,
    "serve": _serve,
    "cores": _cores,
    "stages": _stages,
}


if __name__ == "__main__":
    add_stand_in()
    sys.exit(main())
