"""Many machines: a real Ray cluster of two nodes gives what one process gives, whatever becomes of its workers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hdruntime
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.errors import BackendError, BundleError, HdexportError, InputError, write
from hdruntime.jobs import Job, JobOptions, plan_job, run_job
from hdruntime.jobs.options import RowOptions
from hdruntime.jobs.row_inference import LocalPool
from hdruntime.jobs.row_reader import row_maker
from hdruntime.jobs.rows import Columns, Position, Row
from hdruntime.jobs.shards import Shard, ShardResult, split_into_shards
from hdruntime.ray import BundleMapper, RayPool
from hdruntime.ray import pool as pool_module
from hdruntime.ray.worker import JobWorker
from hdruntime.text.encoding import Overflow
from support.colbert_models import made_colbert
from support.commands import HDEXPORT, run_installed
from support.comparators import assert_close
from support.grids import nightly_unless
from support.recurrent_bundle import make_streaming_bundle
from support.tiny_bundle import MAX_LEN, WORDS, make_bundle
from support.waiting import wait_until

GOOD_WORDS = [word for word in WORDS[4:] if word != "nan"]
BLOCK_ROWS = 75
COLUMNS = ["embedding", "tokens", "error"]


def some_texts(count: int, *, longest: int = MAX_LEN - 2) -> list[str]:
    choose = random.Random(5)
    return [" ".join(choose.choices(GOOD_WORDS, k=choose.randint(0, longest))) for _ in range(count)]


# Every third row fails in one of three ways.
TEXTS = [
    text if number % 3 else ["nan", "long " * MAX_LEN, "\x00"][number // 3 % 3]
    for number, text in enumerate(some_texts(300))
]


NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node of one core. This process is connected."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    # Without the processes that show logs and add machines.
    alone = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    # A lost node is detected in a second, not in 16; a slow one has as much time as usual.
    lost = {"health_check_initial_delay_ms": 200, "health_check_period_ms": 200}
    made = Cluster(initialize_head=True, head_node_args={**NODE, **alone, "_system_config": lost})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def two_nodes(cluster: Any) -> Any:
    """The cluster, with a second node of one core, which a test may take away."""
    if not cluster.worker_nodes:
        cluster.add_node(**NODE)
    return cluster


@pytest.fixture(scope="module")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundles") / "tiny")


@pytest.fixture
def job(bundle_path: Path, tmp_path: Path) -> Job:
    return job_of(bundle_path, TEXTS, tmp_path)


def job_of(
    bundle_path: Path, texts: list[str], folder: Path, *, output: str = "out.jsonl", options: JobOptions | None = None
) -> Job:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return plan_job(hdruntime.open_bundle(bundle_path), [rows], folder / output, options=options)


def shards_of(texts: list[str], *, characters: int = 400) -> list[Shard]:
    row_of = row_maker(Columns())
    rows = (row_of({"text": text}, Position(row=number)) for number, text in enumerate(texts, start=1))
    return list(split_into_shards(rows, characters=characters))


def results_in_one_process(bundle_path: Path, job: Job, shards: list[Shard]) -> list[tuple[Shard, ShardResult]]:
    with hdruntime.load(bundle_path, threads=1) as session:
        return list(LocalPool(session, job.task, options=job.options).map(iter(shards)))


def comparable(pairs: list[tuple[Shard, ShardResult]]) -> list[tuple[object, ...]]:
    """Rows, counts and results in order, vectors as their bits."""

    def bits(row: dict[str, Any]) -> dict[str, object]:
        return {**row, "embedding": None if row["embedding"] is None else row["embedding"].tobytes()}

    return [(shard.rows, result.counts, list(map(bits, result.results))) for shard, result in pairs]


def workers() -> list[psutil.Process]:
    """The processes that Ray names after our worker.

    They descend from this process: others on this machine may run such a test, too.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::JobWorker"):
                found.append(process)
    return found


def living_nodes() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def test_two_workers_give_the_rows_and_bits_of_one_process_whatever_becomes_of_them_and_leave_the_cluster(
    two_nodes: Any, bundle_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker is killed, another one later, and then a node is lost."""
    import ray

    shards = shards_of(TEXTS)
    assert len(shards) > 20
    drawn, killed = 0, []

    def killing() -> Iterator[Shard]:
        nonlocal drawn
        for number, shard in enumerate(shards):
            drawn += 1
            if number in (10, 15):
                # One that was killed may still be there.
                killed.append(next(worker.pid for worker in workers() if worker.pid not in killed))
                os.kill(killed[-1], signal.SIGKILL)
            if number == 20:
                two_nodes.remove_node(two_nodes.worker_nodes.copy().pop(), allow_graceful=False)
            yield shard

    got = []
    with RayPool(bundle_path, job) as pool:
        wait_until(lambda: len(workers()) == 2)
        for pair in pool.map(killing()):
            # Memory is bounded: what was read ahead of what was handed out.
            assert drawn - len(got) <= 8
            got.append(pair)
    assert ray.is_initialized()
    wait_until(lambda: not workers())
    # Others are to find the cluster as it is.
    wait_until(lambda: living_nodes() == 1)
    assert len(killed) == 2
    # The worker of the lost node may be the one that was killed last, and is not there yet.
    assert caplog.text.count("a worker died and is replaced") in (2, 3)
    expected = results_in_one_process(bundle_path, job, shards)
    assert comparable(got) == comparable(expected)
    assert sum(result.counts.failed_rows for _, result in got) == len(TEXTS) / 3
    # The comparison sees an exchanged pair of shards, and one that is there twice.
    for wrong in ([got[1], got[0], *got[2:]], [*got, got[-1]]):
        assert comparable(wrong) != comparable(expected)


def on_a_worker(bundle_path: Path, job: Job, shards: list[Shard]) -> list[tuple[Shard, ShardResult]]:
    """What a worker makes of shards: in a task, whose process the next one reuses; each actor starts a new one."""
    import ray

    def call(identity: str, options: JobOptions, rows: list[list[Row]]) -> list[ShardResult]:
        worker = JobWorker()
        worker.load(bundle_path, options, backend="auto", threads=1, identity=identity)
        return [worker.infer(each) for each in rows]

    identity = identity_of_bundle(hdruntime.open_bundle(bundle_path).manifest)
    given = (identity, job.options, [shard.rows for shard in shards])
    return list(zip(shards, ray.get(ray.remote(num_cpus=0)(call).remote(*given)), strict=True))


def test_late_chunking_gives_on_a_worker_what_it_gives_in_one_process(
    cluster: Any, bundle_path: Path, tmp_path: Path
) -> None:
    job = job_of(bundle_path, TEXTS, tmp_path, options=JobOptions(late_chunking="tokens:4", overlap=3))
    shards = shards_of(TEXTS)
    got = on_a_worker(bundle_path, job, shards)
    assert comparable(got) == comparable(results_in_one_process(bundle_path, job, shards))
    assert sum(len(result.results) for _, result in got) > 2 * len(TEXTS)


def test_streamed_rows_are_on_a_worker_what_they_are_in_one_process(cluster: Any, tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    job = job_of(bundle, TEXTS, tmp_path, options=JobOptions(overflow=Overflow.RECUR, segment=4))
    shards = shards_of(TEXTS)
    got = on_a_worker(bundle, job, shards)
    assert comparable(got) == comparable(results_in_one_process(bundle, job, shards))
    too_long = TEXTS.count("long " * MAX_LEN)
    assert sum(result.counts.failed_rows for _, result in got) == len(TEXTS) / 3 - too_long


@pytest.mark.parametrize(
    ("doing", "deaths", "message"),
    [
        ("infer", 2, "2 workers of the Ray cluster died running the rows 0 to "),
        ("load", 1, "died loading the bundle "),
    ],
)
def test_workers_that_die_over_and_over_end_the_job_with_the_reason(
    cluster: Any, bundle_path: Path, job: Job, doing: str, deaths: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: JobWorker, *_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    # Each worker takes a second to start.
    monkeypatch.setattr(pool_module, "_MAX_DEATHS", deaths)
    monkeypatch.setattr(pool_module, "JobWorker", type("JobWorker", (JobWorker,), {doing: die}))
    with (
        pytest.raises(BackendError, match=f"{message}(.|\n)*batch_tokens"),
        RayPool(bundle_path, job) as pool,
    ):
        list(pool.map(iter(shards_of(TEXTS))))
    wait_until(lambda: not workers())


def test_another_bundle_at_the_same_path_is_refused(cluster: Any, bundle_path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle_path, tmp_path / "copy"))
    pool = RayPool(copy, job_of(copy, TEXTS, tmp_path))
    shutil.rmtree(copy)
    make_bundle(copy, token_types=True)
    with pytest.raises(BundleError, match=r"^Node \S+ of the Ray cluster has another bundle at .*copy") as raised:
        pool.__enter__()
    # Not the class that Ray derives from ours.
    assert type(raised.value) is BundleError


def test_an_address_is_refused_where_the_process_is_connected(cluster: Any, bundle_path: Path, job: Job) -> None:
    with (
        pytest.raises(InputError, match="already connected to Ray"),
        RayPool(bundle_path, job, address="10.0.0.1:6379"),
    ):
        pass


def mapped(texts: list[str | None], bundle_path: Path) -> pa.Table:
    """What map_batches makes of the texts, in their order."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    table = pa.table({"number": range(len(texts)), "text": texts})
    # Blocks made here: a task to cut them would wait for a whole core, of which the actors leave none.
    blocks = ray.data.from_arrow([table.slice(start, BLOCK_ROWS) for start in range(0, len(table), BLOCK_ROWS)])
    done = blocks.map_batches(
        BundleMapper,
        fn_constructor_kwargs={"bundle": bundle_path},
        batch_format="pyarrow",
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=0.5,
    )
    return pa.concat_tables(ray.get(done.to_arrow_refs())).sort_by("number")


def in_a_task(texts: list[str | None], bundle_path: Path, **options: Any) -> pa.Table:
    """What the mapper makes of the same batches in a process of Ray."""
    import ray

    def call(table: pa.Table) -> pa.Table:
        mapper = BundleMapper(bundle_path, **options)
        starts = range(0, len(table), BLOCK_ROWS)
        return pa.concat_tables([mapper(table.slice(start, BLOCK_ROWS)) for start in starts])

    table = pa.table({"number": range(len(texts)), "text": texts})
    return ray.get(ray.remote(num_cpus=0)(call).remote(table))


@pytest.mark.parametrize("run", [in_a_task, nightly_unless(False, mapped)])
def test_map_batches_adds_what_a_job_writes(
    cluster: Any, bundle_path: Path, job: Job, run: Callable[[list[str | None], Path], pa.Table]
) -> None:
    table = run([*TEXTS, None], bundle_path)
    assert table.column_names == ["number", "text", *COLUMNS]
    # As in a job's Parquet: pyarrow before 26 reads no null in a list of a fixed size.
    assert table.schema.field("embedding").type == pa.list_(pa.float32())
    assert table.column("error")[-1].as_py() == "Column 'text' is null; a string is required."
    # To the last bit, of the same batches.
    blocks = [TEXTS[start : start + BLOCK_ROWS] for start in range(0, len(TEXTS), BLOCK_ROWS)]
    shards = [shards_of(block, characters=10**6)[0] for block in blocks]
    expected = [row for _, done in results_in_one_process(bundle_path, job, shards) for row in done.results]
    assert table.column("tokens").to_pylist()[:-1] == [row["tokens"] for row in expected]
    errors = [None if row["error"] is None else write(row["error"]) for row in expected]
    assert table.column("error").to_pylist()[:-1] == errors
    vectors = [None if row["embedding"] is None else row["embedding"].tolist() for row in expected]
    assert table.column("embedding").to_pylist()[:-1] == vectors


def test_map_batches_says_which_texts_were_truncated(cluster: Any, bundle_path: Path) -> None:
    texts = ["read", "long " * 20, None]
    table = in_a_task(texts, bundle_path, options=RowOptions(overflow=Overflow.TRUNCATE))
    counts = {name: table.column(name).to_pylist() for name in ("tokens", "truncated", "tokens_given")}
    assert counts == {"tokens": [3, 16, None], "truncated": [False, True, None], "tokens_given": [3, 22, None]}


def test_map_batches_adds_a_vector_for_each_token(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle_path = made_colbert(tmp_path_factory, "classic") / "bundle"
    texts = ["a text that is read", "another"]
    table = in_a_task([*texts, None], bundle_path)
    with hdruntime.MultiVectorEncoder(bundle_path) as encoder:
        expected = encoder.encode_document(texts)
    found = table.column("embedding").to_pylist()
    assert found.pop() is None
    for vectors, of_encoder in zip(found, expected, strict=True):
        assert_close(np.array(vectors, np.float32), of_encoder, atol=1e-6)


NO_MAPPER: list[tuple[dict[str, Any], object, str]] = [
    ({}, {"text": ["read"]}, 'given a dict; it needs Arrow tables.(.|\n)*batch_format="pyarrow"'),
    ({}, pa.table({"body": ["read"]}), "no column 'text'; its columns are body"),
    ({}, pa.table({"text": ["read"], "tokens": [1]}), "already has columns 'tokens', which are names of results"),
    ({"backend": "tensorrt"}, None, "Ray assigned none to this worker(.|\n)*num_gpus=1"),
    (
        {"bundle": "/no/such"},
        None,
        r"BundleNotFoundError: Node \S+ of the Ray cluster: There is no bundle at /no/such(.|\n)*at the same path",
    ),
    ({"text_pair_column": "b", "input_ids_column": "c"}, None, "texts or ids, not both"),
    ({"input_ids_column": "c", "options": RowOptions(overflow=Overflow.SPLIT)}, None, "are not split"),
    ({"options": RowOptions(batch_tokens=0)}, None, "batch_tokens is 0; it must be 1 or more"),
]


def test_what_does_not_fit_a_mapper_is_said(cluster: Any, bundle_path: Path) -> None:
    import ray

    def call(given: list[tuple[dict[str, Any], Any]]) -> list[str]:
        said = []
        for options, batch in given:
            try:
                BundleMapper(**{"bundle": bundle_path, **options})(batch)
            except HdexportError as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    found = ray.get(ray.remote(num_cpus=0)(call).remote([case[:2] for case in NO_MAPPER]))
    for (options, _, message), said in zip(NO_MAPPER, found, strict=True):
        assert re.search(message, said), (options, said)


def blocks_of_docs(language: str, replaced: dict[str, str]) -> list[str]:
    """The code blocks of docs/ray.md in a language, with other paths and addresses."""
    text = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    for place, here in replaced.items():
        assert place in text
        text = text.replace(place, here)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.nightly
def test_the_examples_of_the_documentation_run_and_leave_the_cluster(
    two_nodes: Any, bundle_path: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(bundle_path, shared / "bundle")
    job = job_of(shared / "bundle", TEXTS, tmp_path, output="in_one_process.parquet")
    run_in_one_process(shared / "bundle", job)
    (tmp_path / "rows.jsonl").rename(tmp_path / "documents.jsonl")
    (shared / "texts").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"text": TEXTS[number::2]}), shared / "texts" / f"{number}.parquet")
    nodes, environment = living_nodes(), os.environ | {"RAY_ADDRESS": two_nodes.address}
    environment["PATH"] = f"{Path(HDEXPORT).parent}{os.pathsep}{environment['PATH']}"
    replaced = {"/shared/": f"{shared}/", "head:6379": two_nodes.address}

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)

    alone = run(["hdexport", "run", f"{shared}/bundle", "documents.jsonl", "-o", "alone.parquet", "--threads", "1"])
    assert alone.returncode == 2, alone.stderr
    expected = pq.read_table(tmp_path / "alone.parquet")
    (commands,) = blocks_of_docs("sh", replaced)
    # The last one is of Ray Serve, which the suite does not install; the one before it has a test of its own.
    pooled, mapped, _, _ = blocks_of_docs("python", replaced)
    for line in commands.splitlines():
        done = run(["sh", "-c", line])
        assert done.returncode == 2, done.stderr
        assert "\n100 of 300 rows failed" in f"\n{done.stderr}"
        assert done.stdout.startswith("300 rows, 100 failed, ")
        assert done.stdout.splitlines()[1:] == [
            "Backend: onnxruntime in float32. Ray assigned no GPU to the workers. The bundle has no graph for OpenVINO."
        ]
        assert pq.read_table(tmp_path / "vectors.parquet").equals(expected)
        (tmp_path / "vectors.parquet").unlink()
    # Without an address Ray Data takes this machine, here one of two cores and no GPU.
    for code in (pooled, f"import ray\nray.init('local', num_cpus=2, num_gpus=0, include_dashboard=False)\n{mapped}"):
        done = run([sys.executable, "-c", code])
        assert done.returncode == 0, done.stderr
    # Errors name parameters in Python, and flags on the command line.
    assert pq.read_table(tmp_path / "vectors.parquet").equals(pq.read_table(job.output))
    results = pq.read_table(shared / "results")
    assert results.num_rows == len(TEXTS)
    assert results.column_names == ["text", *COLUMNS]
    assert sorted(results.column("text").to_pylist()) == sorted(TEXTS)
    assert results.column("error").null_count == expected.column("error").null_count
    assert living_nodes() == nodes


@pytest.mark.nightly
def test_a_pipeline_that_was_killed_continues_after_its_files(bundle_path: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(bundle_path, shared / "bundle")
    (shared / "texts").mkdir()
    texts = some_texts(6000)
    for number in range(6):
        rows = range(number * 1000, number * 1000 + 1000)
        table = pa.table({"id": rows, "text": [texts[row] for row in rows]})
        pq.write_table(table, shared / "texts" / f"{number}.parquet", row_group_size=100)
    *_, code, _ = blocks_of_docs("python", {"/shared/": f"{shared}/", "16 * 2**20": "4096", "size=2": "size=1"})
    code = f"import ray\nray.init('local', num_cpus=4, num_gpus=0, include_dashboard=False)\n{code}"
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    command, vectors = [sys.executable, "-c", code], shared / "vectors"
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=environment, stderr=log) as first:
        wait_until(lambda: vectors.is_dir() and len(list(vectors.iterdir())) > 3, seconds=300)
        processes = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    killed = {file.name for file in vectors.iterdir()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = pq.read_table(vectors)
    assert sorted(results.column("id").to_pylist()) == list(range(6000))
    assert len(killed & {file.name for file in vectors.iterdir()}) > 1, "the first run's files were written again"
    assert not list((shared / "checkpoint").glob("*"))


def run_in_one_process(bundle_path: Path, job: Job) -> bytes:
    with hdruntime.load(bundle_path, threads=1) as session:
        run_job(job, LocalPool(session, job.task, options=job.options))
    return job.output.read_bytes()


@pytest.mark.nightly
def test_the_command_starts_a_cluster_and_ends_it(bundle_path: Path, tmp_path: Path) -> None:
    job = job_of(bundle_path, some_texts(400), tmp_path)
    before = ray_servers()
    # Of one worker.
    options = ["--ray", "--threads", os.cpu_count()]
    done = run_installed("run", bundle_path, tmp_path / "rows.jsonl", "-o", tmp_path / "ray.jsonl", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("400 rows, 0 failed, ")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[1:]] == ["Backend"]
    assert ray_servers() == before
    assert (tmp_path / "ray.jsonl").read_bytes() == run_in_one_process(bundle_path, job)


def ray_servers() -> set[int]:
    names = ("raylet", "gcs_server")
    return {process.pid for process in psutil.Process().children(recursive=True) if process.name() in names}
