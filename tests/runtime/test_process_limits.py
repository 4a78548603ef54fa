"""CPUs and memory that a process may use: affinity, quotas and limits of control groups, and what heeds them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hdruntime
from fakes.recording_runner import RecordingRunner
from hdruntime import process_limits
from hdruntime.backends.onnxruntime import sessions as onnxruntime_sessions
from hdruntime.backends.onnxruntime.sessions import session_options
from hdruntime.bundle.reader import open_bundle
from hdruntime.inference.batching import tokens_with_room
from hdruntime.process_limits import chosen_threads, cpu_quota, free_bytes, memory_limit_bytes
from hdruntime.serve import ServeOptions

MEMINFO = "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"


def machine(root: Path, groups: str | None, files: dict[str, str], meminfo: str = MEMINFO) -> Path:
    """A root directory with the files that the kernel shows of memory and control groups; None for no such file."""
    for name, text in {
        "proc/meminfo": meminfo,
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


def of_cpu(path: str, quota: int | str, period: int = 100_000, *, version: int = 2) -> dict[str, str]:
    """The quota of a control group."""
    if version == 2:
        return {f"{path}cpu.max": f"{quota} {period}\n"}
    return {f"{path}cpu.cfs_quota_us": f"{quota}\n", f"{path}cpu.cfs_period_us": f"{period}\n"}


V1 = "11:memory:/x\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param(None, of_cpu("", 50_000), None, id="no groups"),
        pytest.param("0::/\n", {}, None, id="version 2, the machine's outermost group"),
        pytest.param("0::/\n", of_cpu("", 50_000), 0.5, id="version 2, namespace of a container"),
        pytest.param("0::/\n", of_cpu("", "max"), None, id="version 2, no limit"),
        pytest.param("0::/a/b\n", of_cpu("a/b/", 300_000) | of_cpu("a/", "max"), 3.0, id="version 2, own group"),
        pytest.param("0::/a/b\n", of_cpu("a/b/", 300_000) | of_cpu("a/", 150_000), 1.5, id="version 2, group above"),
        pytest.param("0::/docker/12\n", of_cpu("", 25_000, 50_000), 0.5, id="version 2, own group as the outermost"),
        pytest.param(
            "0::/../x\n", of_cpu("", 50_000) | of_cpu("../", 10_000), 0.5, id="version 2, moved out of the namespace"
        ),
        pytest.param("0::/a\n", of_cpu("unified/a/", 50_000), 0.5, id="version 2 beside version 1"),
        pytest.param(V1, of_cpu("cpu,cpuacct/a/b/", 250_000, version=1), 2.5, id="version 1"),
        pytest.param(V1, of_cpu("cpu/a/b/", 250_000, version=1), 2.5, id="version 1, short mount"),
        pytest.param(V1, of_cpu("cpu/a/b/", -1, version=1) | of_cpu("cpu/", -1, version=1), None, id="1, no limit"),
        pytest.param(
            V1, of_cpu("cpu/a/b/", -1, version=1) | of_cpu("cpu/a/", 100, 1000, version=1), 0.1, id="1, above"
        ),
        pytest.param(V1, of_cpu("cpu/", 50_000, version=1), 0.5, id="version 1, own group as the outermost"),
        pytest.param("4:cpuset:/a\n", of_cpu("cpuset/a/", 50_000, version=1), None, id="another controller"),
        pytest.param("0::/a\n", {"a/cpu.max": "garbage\n", **of_cpu("", 50_000)}, 0.5, id="garbage, a limit above"),
        pytest.param("0::/a\n", {"a/cpu.max": ""}, None, id="empty"),
        pytest.param("0::/a\n", of_cpu("a/", 50_000, 0), None, id="a period of 0"),
        pytest.param("\n:\ncpu\n0:\n", {}, None, id="garbage of groups"),
    ],
)
def test_the_quota_is_the_least_of_the_groups_of_the_process(
    groups: str | None, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert cpu_quota(machine(tmp_path, groups, files)) == expected


def test_a_group_whose_name_is_not_utf_8_is_read(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup" / os.fsdecode(b"a\xff")
    try:
        group.mkdir(parents=True)
    except OSError:
        pytest.skip("this file system has no such names")
    (group / "cpu.max").write_text("50000 100000\n")
    machine(tmp_path, "", {})
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/a\xff\n")
    assert cpu_quota(tmp_path) == 0.5


def cpus_of(monkeypatch: pytest.MonkeyPatch, root: Path, allowed: set[int], *, of: int, siblings: int = 1) -> Path:
    """A machine with so many CPUs; those of a core have numbers that differ by the number of cores, as Linux's."""
    monkeypatch.setattr(process_limits, "usable_cpus", lambda: frozenset(allowed))
    monkeypatch.setattr(os, "cpu_count", lambda: of)
    for cpu in range(of):
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        cores = of // siblings
        file.write_text(",".join(str(cpu % cores + cores * number) for number in range(siblings)) + "\n")
    return root


@pytest.mark.parametrize(
    ("allowed", "of", "siblings", "quota", "expected"),
    [
        ({0, 1}, 2, 1, "max", "2 threads: 2 CPUs"),
        ({5}, 16, 1, "max", "1 thread: the process may use 1 of 16 CPUs (affinity)"),
        ({0, 1}, 16, 1, 800_000, "2 threads: the process may use 2 of 16 CPUs (affinity)"),
        ({0, 1}, 2, 1, 50_000, "1 thread: the container's quota is 0.5 CPUs"),
        ({0, 1}, 2, 1, 150_000, "2 threads: the container's quota is 1.5 CPUs"),
        ({*range(16)}, 16, 1, 100_000, "1 thread: the container's quota is 1 CPU"),
        ({*range(16)}, 16, 2, 350_000, "4 threads: the container's quota is 3.5 CPUs"),
        ({*range(16)}, 16, 2, "max", "8 threads: 16 CPUs, on 8 cores"),
        ({0, 8}, 16, 2, "max", "1 thread: the process may use 2 of 16 CPUs (affinity), on 1 core"),
        ({0, 1, 9}, 16, 2, 1_000_000, "2 threads: the process may use 3 of 16 CPUs (affinity), on 2 cores"),
    ],
)
def test_threads_are_the_least_of_cores_affinity_and_quota(
    allowed: set[int],
    of: int,
    siblings: int,
    quota: int | str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = machine(tmp_path, "0::/\n", of_cpu("", quota))
    cpus_of(monkeypatch, root, allowed, of=of, siblings=siblings)
    assert chosen_threads(root=root) == (int(expected.split()[0]), expected)
    assert chosen_threads(3, root=root) == (3, "3 threads: asked for")


def test_without_proc_and_sys_threads_are_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert chosen_threads(root=tmp_path) == (4, "4 threads: 4 CPUs")
    assert (free_bytes(tmp_path), memory_limit_bytes(tmp_path)) == (None, None)


def of_memory(path: str, limit: str, usage: int, stat: str, *, version: int = 2) -> dict[str, str]:
    """The memory of a control group."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return {f"{path}{names[0]}": f"{limit}\n", f"{path}{names[1]}": f"{usage}\n", f"{path}memory.stat": f"{stat}\n"}


FREE = 8_000_000 * 1024
NESTED = of_memory("a/", "1000000", 900_000, "anon 1\ninactive_file 50000") | of_memory(
    "a/b/", "max", 5, "inactive_file 0"
)
OF_VERSION_1 = of_memory("memory/x/", "700000", 600_000, "inactive_file 1\ntotal_inactive_file 7", version=1)
WITHOUT_LIMIT = of_memory("memory/x/", str(2**63 - 4096), 600_000, "total_inactive_file 7", version=1)


@pytest.mark.parametrize(
    ("groups", "files", "free", "limit"),
    [
        pytest.param("", {}, FREE, None, id="no groups"),
        pytest.param("0::/a/b\n", NESTED, 150_000, 1_000_000, id="version 2, the narrowest group above"),
        pytest.param("5:cpu:/x\n4:memory:/x\n0::/\n", OF_VERSION_1, 100_007, 700_000, id="version 1"),
        pytest.param("4:memory:/x\n", WITHOUT_LIMIT, FREE, None, id="version 1, no limit"),
        pytest.param(
            "0::/docker/123\n", of_memory("", "500", 900, "inactive_file 0"), 0, 500, id="own group as the outermost"
        ),
        pytest.param(
            "0::/\n", of_memory("", "900", 500, "garbage\n\n"), 400, 900, id="garbage of the reclaimable part"
        ),
        pytest.param("0::/\n", of_memory("", "garbage", 500, ""), FREE, None, id="garbage"),
    ],
)
def test_free_memory_is_bounded_by_the_control_groups(
    groups: str, files: dict[str, str], free: int, limit: int | None, tmp_path: Path
) -> None:
    root = machine(tmp_path, groups, files)
    assert (free_bytes(root), memory_limit_bytes(root)) == (free, limit)


@pytest.mark.parametrize("meminfo", ["", "MemAvailable:\n", "MemAvailable: many kB\n", "MemFree: 5 kB\n"])
def test_free_memory_that_is_not_reported_is_not_known(meminfo: str, tmp_path: Path) -> None:
    assert free_bytes(machine(tmp_path, "", {}, meminfo)) is None


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put this process in a container, as far as files of control groups say."""

    def limit(**files: str) -> None:
        folder = tmp_path / "group"
        folder.mkdir()
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text)
        monkeypatch.setattr(process_limits, "_groups", lambda controller, root: [(2, folder)])
        # The tests' sessions have one thread unless they ask for more.
        monkeypatch.setattr(onnxruntime_sessions, "chosen_threads", chosen_threads)

    return limit


def test_a_quota_is_the_number_of_threads_and_the_log_says_so(
    container: Callable[..., None],
    bundle_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process_limits, "usable_cpus", lambda: frozenset(range(100, 116)))
    container(cpu_max="250000 100000")
    assert session_options(None).intra_op_num_threads == 3
    assert session_options(5).intra_op_num_threads == 5
    caplog.set_level(logging.INFO)
    hdruntime.load(bundle_path, "onnxruntime").close()
    assert "on the CPU, 3 threads: the container's quota is 2.5 CPUs" in caplog.text
    hdruntime.load(bundle_path, "onnxruntime", threads=2).close()
    assert "on the CPU, 2 threads: asked for" in caplog.text


@pytest.mark.parametrize(("threads", "spins"), [(1, True), (2, False), (3, False)])
def test_threads_that_would_use_up_the_quota_do_not_spin(
    threads: int, spins: bool, container: Callable[..., None]
) -> None:
    container(cpu_max="150000 100000")
    options = session_options(threads)
    if spins:
        with pytest.raises(RuntimeError, match="allow_spinning"):
            options.get_session_config_entry("session.intra_op.allow_spinning")
    else:
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.skipif(len(process_limits.usable_cpus()) < 2, reason="a quota of one CPU is none on one CPU")
def test_openvino_has_no_more_threads_than_the_quota(container: Callable[..., None], openvino_bundles: Any) -> None:
    pytest.importorskip("openvino")
    path = openvino_bundles("bert").path

    def threads(asked: int | None) -> int:
        with hdruntime.load(path, "openvino", threads=asked) as session:
            model = session._scheduler.runner._unpadded._request.get_compiled_model()  # type: ignore[attr-defined]
            return int(model.get_property("INFERENCE_NUM_THREADS"))

    assert threads(None) > 1
    container(cpu_max="50000 100000")
    assert (threads(None), threads(2)) == (1, 2)


_THREADS = """
import os, sys
allowed = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, allowed)
import hdruntime
def places():
    return {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}
before = places()
for threads in (None, 2):
    session = hdruntime.load(sys.argv[1], "onnxruntime", threads=threads)
    session.embed(["long documents"])
    new = [place for task, place in places().items() if task not in before]
    assert all(place <= allowed for place in new), new
    print(len(new))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
@pytest.mark.skipif(len(process_limits.usable_cpus()) < 2, reason="one CPU is all there are")
def test_threads_stay_on_the_cpus_that_the_process_may_use(bundle_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", _THREADS, bundle_path], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    _, of_two = map(int, ran.stdout.split())
    assert of_two >= 1, "beside the caller's; other threads come and go meanwhile"


def test_a_batch_has_room_in_half_of_the_free_memory(bundle_path: Path) -> None:
    manifest = open_bundle(bundle_path).manifest
    assert manifest.hidden_size == 4
    # 32 times the hidden size, and the output of that size twice, four bytes each.
    assert tokens_with_room(manifest, free_bytes=2 * 4 * (32 + 2) * 4 * 100) == 100
    assert tokens_with_room(manifest, free_bytes=2 * 4 * (32 + 2) * 4 * 100 - 1) == 99
    assert tokens_with_room(manifest, free_bytes=0) == 1
    assert tokens_with_room(manifest, free_bytes=None) == sys.maxsize


def test_batches_are_smaller_from_the_start_where_memory_is_short(
    container: Callable[..., None], bundle_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    container(memory_max="10000000", memory_current=str(10_000_000 - 2 * 4 * (32 + 2) * 4 * 20), memory_stat="")
    caplog.set_level(logging.INFO)
    runner = RecordingRunner(memory=20, batch_tokens=64)
    with hdruntime.Session(open_bundle(bundle_path), runner) as session:
        texts = session.tokenize(["long documents are"] * 12)
        assert session.batch_tokens == 20
        session.infer(texts)
        assert (runner.failures, max(rows * tokens for rows, tokens in runner.shapes)) == (0, 20)
        # The number of a user is tried.
        session.infer(texts, batch_tokens=64)
        assert runner.failures > 0
    assert "batches have at most 20 tokens: 0 MB of memory are free" in caplog.text


def test_a_gpus_batches_do_not_depend_on_this_memory(container: Callable[..., None], bundle_path: Path) -> None:
    container(memory_max="10000000", memory_current="10000000", memory_stat="")
    runner = RecordingRunner(batch_tokens=64)
    runner.backend = hdruntime.Backend.TENSORRT
    with hdruntime.Session(open_bundle(bundle_path), runner) as session:
        assert session.batch_tokens == 64


def test_the_queue_of_a_server_takes_a_quarter_of_the_free_memory_at_most(container: Callable[..., None]) -> None:
    container(memory_max="100000000", memory_current="50000000", memory_stat="inactive_file 1200000\n")
    assert ServeOptions().queue_tokens() == 50_000
    assert ServeOptions(max_queue_tokens=70_000).queue_tokens() == 70_000
    with pytest.raises(hdruntime.InputError, match="max_queue_tokens is 0"):
        ServeOptions(max_queue_tokens=0).check()
    ServeOptions().check()
