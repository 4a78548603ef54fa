"""The library in C under AddressSanitizer and UndefinedBehaviorSanitizer: the tests of its operators, run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import hdplugins

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc on Linux"),
]

OPERATOR_TESTS = Path(__file__).with_name("test_kernel_operators.py")
FLAGS = "-std=c11 -g -O1 -shared -fPIC -fsanitize=address,undefined -fno-sanitize-recover=all"
CHOSEN = (
    "any_answer or names_what_is_not_there or threads_share or without_texts or what_fails or two_sessions or "
    "python_is_entered or right_answers"
)
"""All but those that run no code of the library's."""


def library_of_gcc(name: str) -> str:
    shown = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = shown.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"gcc has no {name} here")
    return path


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    # A copy of the package, with another library, which Python finds before the installed one.
    package = shutil.copytree(
        Path(hdplugins.__file__).parent, tmp_path / "hdplugins", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    source = package / "onnxruntime" / "launcher.c"
    library = source.with_name(f"_launcher{EXTENSION_SUFFIXES[0]}")
    subprocess.run(["gcc", *FLAGS.split(), "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    tests = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(tests)]),
        # ONNX Runtime throws exceptions, which the sanitizer looks at where it finds the C++ library at its start.
        "LD_PRELOAD": f"{library_of_gcc('libasan.so')}:{library_of_gcc('libstdc++.so.6')}",
        # Python, PyTorch and ONNX Runtime keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
    }
    found = subprocess.run(
        [sys.executable, "-c", "from hdplugins.onnxruntime.operators import library_path as a; print(a())"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == str(library)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(OPERATOR_TESTS), "-k", CHOSEN],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
