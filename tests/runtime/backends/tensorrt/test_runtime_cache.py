"""TensorRT-RTX's runtime cache: its path, its identity, and damaged files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.machine import Machine, MachineMaker, new_batch
from fakes.simulated_tensorrt import CACHE_MAGIC
from hdruntime.backends.tensorrt import runtime_cache
from hdruntime.backends.tensorrt.runtime_cache import RuntimeCacheFile
from hdruntime.bundle.reader import open_bundle
from hdruntime.constants import RUNTIME_CACHE_SUFFIX


@pytest.fixture
def machine(new_machine: MachineMaker) -> Machine:
    return new_machine(variant="tensorrt_rtx")


def cache_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{RUNTIME_CACHE_SUFFIX}"))


def compiled(machine: Machine) -> set[str]:
    """The shapes with kernels in the latest engine."""
    return set(json.loads(machine.trt.caches[-1].serialize()[len(CACHE_MAGIC) :]))


def test_kernels_are_kept_beside_the_engine_for_the_next_session(machine: Machine) -> None:
    for tokens in (20, 60):
        runner = machine.runner()
        machine.run(runner, new_batch(2, tokens))
        runner.close()
    (file,) = cache_files(machine.bundle.path)
    assert file.parent == machine.bundle.path / "engines"
    assert open_bundle(machine.bundle.path).manifest == machine.bundle.manifest
    machine.runner()
    assert compiled(machine) == {"2x32", "2x64"}


def test_sessions_without_new_shapes_and_other_variants_write_nothing(new_machine: MachineMaker) -> None:
    unused, other = new_machine(variant="tensorrt_rtx"), new_machine()
    unused.runner().close()
    runner = other.runner()
    other.run(runner, new_batch(2, 20))
    runner.close()
    assert [*cache_files(unused.bundle.path), *cache_files(other.bundle.path)] == []


def test_the_cache_is_written_regularly_for_processes_that_are_killed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = machine.runner()
    machine.run(runner, new_batch(2, 20))
    assert cache_files(machine.bundle.path) == []
    now = runtime_cache.time.monotonic() + 61
    monkeypatch.setattr(runtime_cache.time, "monotonic", lambda: now)
    machine.run(runner, new_batch(2, 20))
    (file,) = cache_files(machine.bundle.path)
    written = file.stat().st_mtime_ns
    machine.run(runner, new_batch(2, 20))
    assert file.stat().st_mtime_ns == written


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Nobody, not even root, can write to the folder: a file replaces it."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.write_bytes(b"")
    yield
    folder.unlink()
    away.rename(folder)


@pytest.mark.parametrize("home_is_writable", [True, False])
def test_the_cache_of_a_read_only_bundle_goes_to_the_users_cache(
    home_is_writable: bool, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    home = tmp_path / "home cache"
    if not home_is_writable:
        home.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    runner = machine.runner()
    machine.run(runner, new_batch(2, 20))
    with unwritable(machine.bundle.path / "engines"):
        runner.close()
    assert cache_files(machine.bundle.path) == []
    assert ("TensorRT-RTX's runtime cache could not be written" in caplog.text) is not home_is_writable
    assert machine.device.left() == {}
    if home_is_writable:
        (file,) = cache_files(home)
        assert file.parent == home / "hdexport"
        machine.runner()
        assert compiled(machine) == {"2x32"}


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", lambda data: data[:-2] + b"xx"],
    ids=["torn", "empty", "changed"],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_never_parsed(
    damage: Callable[[bytes], bytes], machine: Machine, caplog: Any, monkeypatch: Any
) -> None:
    runner = machine.runner()
    machine.run(runner, new_batch(2, 20))
    runner.close()
    (file,) = cache_files(machine.bundle.path)
    file.write_bytes(damage(file.read_bytes()))
    monkeypatch.setattr(type(machine.trt.caches[0]), "deserialize", lambda *_: pytest.fail("it was parsed"))
    runner = machine.runner()
    assert f"the runtime cache {file} is damaged and ignored" in caplog.text
    machine.run(runner, new_batch(2, 20))
    runner.close()
    monkeypatch.undo()
    assert compiled(machine) == {"2x32"}


def test_a_cache_that_tensorrt_rtx_refuses_is_ignored_with_a_warning(machine: Machine, caplog: Any) -> None:
    runner = machine.runner()
    runner._model._cache._file.write(b"of another version")
    runner.close()
    runner = machine.runner()
    assert "TensorRT-RTX does not accept its runtime cache from disk" in caplog.text
    machine.run(runner, new_batch(2, 20))
    runner.close()
    machine.runner()
    assert compiled(machine) == {"2x32"}


def test_every_part_of_the_identity_changes_the_file(tmp_path: Path) -> None:
    identities = [("a", "b", "c"), ("a", "b", "d"), ("x", "b", "c"), ("ab", "", "c"), ("a", "b"), ("b", "a", "c")]
    files = {RuntimeCacheFile(tmp_path / "x.engine", identity).paths[0] for identity in identities}
    assert len(files) == len(identities)
    assert all(path.name.startswith("x-") and path.suffix == RUNTIME_CACHE_SUFFIX for path in files)


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for home in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        assert RuntimeCacheFile(tmp_path / "x.engine", ("a",)).paths[1].parent == tmp_path / ".cache" / "hdexport"


def test_a_failed_write_leaves_the_old_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RuntimeCacheFile(tmp_path / "x.engine", ("a",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file.write(b"content")
    assert file.read() == b"content"
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    file.write(b"other")
    assert file.read() == b"content"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.paths[0].name]
