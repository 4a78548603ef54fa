"""What is in the wheels that a release has, and that a machine without a compiler can install hdexport."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "hdplugins/onnxruntime/_launcher.abi3.so"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""Name of a machine -> its number in the header of an ELF file."""

pytestmark = pytest.mark.nightly


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as files:
        return {name for name in files.namelist() if ".dist-info/" not in name}


def modules() -> set[str]:
    """Every module of the packages, as a wheel names it."""
    folders = (ROOT / name for name in ("exporter", "runtime", "plugins"))
    return {path.relative_to(folder).as_posix() for folder in folders for path in folder.rglob("*.py")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What `make wheels` builds: platform -> wheel."""
    if sys.platform != "linux":
        pytest.skip("wheels are built on Linux")
    folder = tmp_path_factory.mktemp("wheels")
    done = subprocess.run(
        [ROOT / ".ci" / "wheels", folder], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    if "No matching distribution found for ziglang" in done.stderr:
        pytest.skip("ziglang, which compiles for both machines, cannot be installed here")
    assert done.returncode == 0, done.stderr
    return {path.stem.split("-", 2)[2]: path for path in folder.iterdir()}


def test_a_wheel_for_each_machine_has_the_library_and_one_has_none(wheels: dict[str, Path]) -> None:
    assert set(wheels) == {
        "cp310-abi3-manylinux2014_x86_64", "cp310-abi3-manylinux2014_aarch64", "py3-none-any",
    }  # fmt: skip
    for platform, wheel in wheels.items():
        names = names_in(wheel)
        assert modules() <= names
        libraries = {name for name in names if name.endswith((".so", ".o", ".a"))}
        assert libraries == (set() if platform == "py3-none-any" else {LIBRARY})


@pytest.mark.parametrize("machine", MACHINES)
def test_the_library_is_for_its_machine_and_loads_in_old_systems(wheels: dict[str, Path], machine: str) -> None:
    with zipfile.ZipFile(wheels[f"cp310-abi3-manylinux2014_{machine}"]) as files:
        library = files.read(LIBRARY)
    assert library[:4] == b"\x7fELF"
    assert int.from_bytes(library[18:20], "little") == MACHINES[machine]
    versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([0-9.]+)", library)}
    assert max(versions) <= (2, 17)
    assert b"PyObject" not in library
    assert b".eh_frame\0" in library, "exceptions pass through it"
    assert len(library) < 32 * 1024


def copied(folder: Path) -> Path:
    """The files that git knows: setuptools writes beside what it builds."""
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in known.strip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_a_source_distribution_has_what_the_library_is_built_of(tmp_path: Path) -> None:
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    source = copied(tmp_path / "source")
    subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as files:
        names = {Path(name).name for name in files.getnames() if "/hdplugins/onnxruntime/" in name}
    assert {"launcher.c", "interface.h", "operators.py"} <= names


def test_without_a_compiler_everything_else_is_built_and_the_log_says_what_is_not(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-v", "-w", tmp_path, source],
        env={**os.environ, "CC": "/bin/false"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'building extension "hdplugins.onnxruntime._launcher" failed' in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert modules() <= names_in(wheel)
    assert not any(name.endswith(".so") for name in names_in(wheel))
