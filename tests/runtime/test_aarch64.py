"""Bundles that were built on this machine, run on ARM under an emulator and compared with this machine's answers.

`make test-all` installs the emulator, Debian for ARM and the runtime's libraries (`.ci/arm64`). Emulated processors:
Cortex-A72 has no float16 arithmetic, Neoverse N1 (Graviton 2) has, Neoverse V1 (Graviton 3) has bfloat16, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from support.commands import run_here
from support.pages import ROOT

MACHINE = Path(sys.prefix) / "aarch64"
PROGRAM = ROOT / "tests" / "support" / "embed_here.py"
LENGTHS = (1, 20, 128)
LONGER = (512, 1000)

nightly = pytest.mark.nightly


class Difference(NamedTuple):
    """The worst text of two answers: largest error of a value, least cosine; NaN if any value is."""

    error: float
    cosine: float

    def is_within(self, *, error: float, cosine: float) -> bool:
        """False for NaN."""
        return self.error <= error and self.cosine >= cosine


def difference(answers: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> Difference:
    """Compare embeddings [1, hidden size] of the same texts, by their names, and print the difference (`pytest -s`)."""
    assert answers.keys() <= reference.keys()
    assert answers
    errors, cosines = [], []
    for name, answer in answers.items():
        a, b = answer.astype(np.float64).ravel(), reference[name].astype(np.float64).ravel()
        errors.append(np.abs(a - b).max())
        cosines.append(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
    found = Difference(float(np.max(errors)), float(np.min(cosines)))
    print(f"{len(answers)} texts: largest error {found.error:.1e}, 1 - cosine {1 - found.cosine:.1e}")
    return found


def test_the_comparison_finds_wrong_answers() -> None:
    rng = np.random.default_rng(0)
    right = {name: rng.standard_normal((1, 384)) / 384**0.5 for name in ("1", "20")}
    limits = {"error": 1e-6, "cosine": 1 - 1e-10}
    assert difference(dict(right), right).is_within(**limits)
    swapped = {"1": right["20"], "20": right["1"]}
    one_value = {**right, "20": right["20"] + np.eye(1, 384, 7) * 1e-4}
    scaled = {name: answer * 1.01 for name, answer in right.items()}
    not_a_number = {**right, "1": np.where(np.arange(384) == 3, np.nan, right["1"])}
    for wrong in (swapped, one_value, scaled, not_a_number):
        assert not difference(wrong, right).is_within(**limits)
    with pytest.raises(AssertionError):
        difference({}, right)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the machine sees as /work: bundles, the program, and hdexport as pip builds and installs it there."""
    if not (MACHINE / "qemu-aarch64").exists():
        pytest.skip("`make test-all` could not install Debian for ARM: no mmdebstrap or no network")
    folder = tmp_path_factory.mktemp("work")
    probe = on_arm(folder, "max", "python3", "-c", "import platform; print(platform.machine())")
    if probe.returncode != 0:
        pytest.skip(f"no emulation here: {probe.stderr[-300:]}")
    assert probe.stdout == "aarch64\n"
    for name, options in (("float32", ["--int8"]), ("float16", ["--fp16"])):
        targets = ["--target", "onnx", "--target", "openvino"]
        done = run_here(
            "build", "--max-len", "1024", *targets, *options, "--no-verify", "-o", folder / name, cwd=folder
        )
        assert done.returncode == 0, done.stderr
    shutil.copy(PROGRAM, folder)
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in known.strip("\0").split("\0"):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    pip = ["python3", "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    done = on_arm(folder, "neoverse-n1", *pip, "--target", "/work/installed", "/work/source")
    assert done.returncode == 0, done.stderr
    return folder


def on_arm(folder: Path, processor: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the emulated machine."""
    environment = {**os.environ, "QEMU_CPU": processor, "PYTHONPATH": "/work/installed", "OMP_NUM_THREADS": "1"}
    whole = [ROOT / ".ci" / "arm64", "run", MACHINE, *command]
    return subprocess.run(whole, cwd=folder, env=environment, capture_output=True, text=True)


def embedded(folder: Path, processor: str | None, bundle: str, lengths: tuple[int, ...], *how: str) -> dict | str:
    """Embeddings by length, of the emulated processor or of this machine; or what is refused."""
    print(processor or "this machine", bundle, *how)
    arguments = ["embed_here.py", bundle, "out.npz", ",".join(map(str, lengths)), *how]
    (folder / "out.npz").unlink(missing_ok=True)
    if processor is None:
        done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    else:
        done = on_arm(folder, processor, "python3", *arguments)
    assert done.returncode == 0, done.stderr
    if not (folder / "out.npz").exists():
        return done.stdout
    with np.load(folder / "out.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, np.ndarray]:
    """This machine's embeddings in float32."""
    answers = embedded(folder, None, "float32", LENGTHS + LONGER, "session", "onnxruntime", "float32")
    assert isinstance(answers, dict)
    return answers


@nightly
def test_the_library_in_c_is_built_there_and_loads(folder: Path) -> None:
    library = folder / "installed/hdplugins/onnxruntime/_launcher.abi3.so"
    assert int.from_bytes(library.read_bytes()[18:20], "little") == 183, "ELF's number of AArch64"
    program = "from hdplugins.onnxruntime.operators import *; print(library_path(), launcher_unavailable_reason())"
    done = on_arm(folder, "cortex-a72", "python3", "-c", program)
    assert (done.returncode, done.stdout) == (0, f"/work/{library.relative_to(folder)} None\n"), done.stderr


@nightly
@pytest.mark.parametrize("processor", ["cortex-a72", "neoverse-v1", "max"])
@pytest.mark.parametrize("how", [("session", "onnxruntime", "auto"), ("graph", "model.onnx")], ids=lambda how: how[0])
def test_float32_is_this_machines(folder: Path, reference: dict, processor: str, how: tuple[str, ...]) -> None:
    lengths = LENGTHS + LONGER if (processor, how[0]) == ("neoverse-v1", "session") else LENGTHS
    answers = embedded(folder, processor, "float32", lengths, *how)
    assert difference(answers, reference).is_within(error=1e-6, cosine=1 - 1e-10)


@nightly
def test_openvino_in_float32_is_this_machines(folder: Path, reference: dict) -> None:
    for bundle, limits in (("float32", (1e-6, 1 - 1e-10)), ("float16", (1e-3, 1 - 5e-6))):
        answers = embedded(folder, "neoverse-v1", bundle, LENGTHS, "session", "openvino", "auto")
        assert difference(answers, reference).is_within(error=limits[0], cosine=limits[1])


@nightly
def test_half_precision_is_computed_in_float32_by_sessions_and_in_float16_by_model_onnx(
    folder: Path, reference: dict
) -> None:
    """float16 sums are as far from float32 as float16's own rounding of weights many times over."""
    weights_rounded = {"error": 3e-4, "cosine": 1 - 1e-6}
    for processor in ("cortex-a72", "neoverse-n1"):
        session = embedded(folder, processor, "float16", LENGTHS, "session", "onnxruntime", "auto")
        assert difference(session, reference).is_within(**weights_rounded)
        graph = embedded(folder, processor, "float16", LENGTHS, "graph", "model.onnx")
        has_float16_arithmetic = processor != "cortex-a72"
        assert difference(graph, reference).is_within(**weights_rounded) is not has_float16_arithmetic
        assert difference(graph, reference).is_within(error=1e-2, cosine=0.999)


@nightly
def test_bfloat16_is_bfloat16_or_refused(folder: Path, reference: dict) -> None:
    for bundle in ("float32", "float16"):
        answers = embedded(folder, "neoverse-v1", bundle, LENGTHS, "session", "onnxruntime", "bfloat16")
        found = difference(answers, reference)
        assert found.is_within(error=1e-2, cosine=0.9999)
        assert not found.is_within(error=3e-4, cosine=1 - 1e-6)
        refused = embedded(folder, "neoverse-n1", bundle, LENGTHS, "session", "onnxruntime", "bfloat16")
        assert "BackendUnavailableError" in refused
        assert "does not compute in bfloat16 on this processor" in refused


@nightly
def test_int8_is_this_machines_or_refused(folder: Path) -> None:
    """A value that float rounding moves to the next of 255 levels is all that differs."""
    int8 = "session", "onnxruntime", "int8"
    here = embedded(folder, None, "float32", LENGTHS, *int8)
    for processor in ("cortex-a72", "neoverse-v1"):
        assert difference(embedded(folder, processor, "float32", LENGTHS, *int8), here).is_within(
            error=1e-2, cosine=0.9995
        )
    refused = embedded(folder, "neoverse-v1", "float32", LENGTHS, "session", "openvino", "int8")
    assert "OpenVINO computes int8 graphs wrongly on ARM" in refused
