"""Files that several tests read and that are slow to make, made once for all workers of a run, or for all runs."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

_KEPT = _ROOT / ".pytest_cache" / "made-once"
"""Folders of files that outlive a run, by the sources that they were made from; `make clean` removes them."""

_NOT_OF_BUILDS = ("bench", "cli", "doctor", "quality", "tune", "verify", "jobs", "ray", "publish")
"""Modules and packages of ours that decide nothing of the files of an unverified build."""

_MAKERS = ("hugging_face.py", "tiny_models.py")
"""Modules of tests/support that make checkpoints."""

_LIBRARIES = ("onnx", "onnx-ir", "onnxscript", "safetensors", "tokenizers", "torch", "transformers")


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None], *, is_kept: bool = False
) -> Path:
    """A directory by its name, filled by the first worker that asks for it. Not to be changed: copy it.

    Other callers wait meanwhile. If making it fails, nothing is left, and the next caller tries again.

    Args:
        factory: of pytest; its base directory is one worker's, the workers' lie side by side.
        name: says all that decides the content, for nothing compares contents.
        make: fills the directory, which is there and empty.
        is_kept: whether later runs find it, too, until a source of builds or a library changes. A clean clone has
            nothing of earlier runs.
    """
    base = factory.getbasetemp()
    run = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"
    shared = _kept_folder() if is_kept else run
    shared.mkdir(exist_ok=True, parents=True)
    directory, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        # The kernel opens the lock of a worker that dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            make(directory)
            done.touch()
    return directory


@functools.cache
def _kept_folder() -> Path:
    """The folder of the present sources. The newest of the other folders stays, for going back and forth."""
    folder = _KEPT / _DIGEST
    folder.mkdir(exist_ok=True, parents=True)
    os.utime(folder)
    others = sorted((other for other in _KEPT.iterdir() if other != folder), key=lambda other: other.stat().st_mtime)
    for other in others[:-1]:
        shutil.rmtree(other, ignore_errors=True)
    return folder


def sources_digest(root: Path = _ROOT) -> str:
    """A hash of all that decides the files of an unverified build of a tiny checkpoint."""
    digest = hashlib.sha256(f"{sys.version} {[version(library) for library in _LIBRARIES]}".encode())
    for file in sorted(_sources(root)):
        digest.update(f"{file.relative_to(root)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _sources(root: Path) -> Iterator[Path]:
    for package in ("exporter/hdexport", "plugins/hdplugins", "runtime/hdruntime"):
        for file in (root / package).rglob("*.py"):
            if file.relative_to(root / package).parts[0].removesuffix(".py") not in _NOT_OF_BUILDS:
                yield file
    yield root / "tests" / "exporter" / "conftest.py"
    yield from (root / "tests" / "support" / name for name in _MAKERS)


_DIGEST = sources_digest()
"""Digest of the sources as this process has them, and not of sources that are edited while tests run."""
