"""The telemetry of ONNX Runtime is off in every process that loads the runtime, OpenVINO's where we import it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SWITCH = "ORT_DISABLE_TELEMETRY"

_OPEN_FILES = """
import os, sys
import hdruntime
with hdruntime.load(sys.argv[1], "onnxruntime", threads=1) as session:
    session(input_ids=[[2, 3]])
    for name in os.listdir("/proc/self/fd"):
        try:
            print(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
"""


def open_files(bundle: Path, home: Path, **environment: str) -> tuple[list[str], list[Path]]:
    """The files that a fresh process has open under its home while it runs a bundle, and those that it leaves there.

    ONNX Runtime also keeps quiet where it takes the machine for one that tests software, by its variables.
    """
    home.mkdir()
    places = {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TMPDIR")}
    done = subprocess.run(
        [sys.executable, "-c", _OPEN_FILES, bundle],
        env={"PATH": os.environ["PATH"], **places, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    opened = [line for line in done.stdout.splitlines() if line.startswith(str(home))]
    return opened, [path for path in home.rglob("*") if path.is_file()]


def test_no_file_of_the_telemetry_is_opened_or_left(bundle_path: Path, tmp_path: Path) -> None:
    assert open_files(bundle_path, tmp_path / "home") == ([], [])


def test_whoever_has_switched_it_on_keeps_that(bundle_path: Path, tmp_path: Path) -> None:
    """Which also shows that the test above would see the telemetry."""
    opened, left = open_files(bundle_path, tmp_path / "home", **{_SWITCH: "0"})
    if not left:
        pytest.skip("this ONNX Runtime has no telemetry")
    assert any("onnxruntime" in name for name in opened)


def test_openvino_is_imported_without_its_telemetry(tmp_path: Path) -> None:
    """Which would leave an identity of the user in the home directory, and send events to its makers."""
    pytest.importorskip("openvino", reason="openvino is not installed")
    code = "import sys; from hdruntime.optional import require; require('openvino'); print(sys.modules[sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom openvino import convert_model", "openvino_telemetry"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert list(tmp_path.rglob("*")) == []
