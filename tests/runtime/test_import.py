"""Importing the runtime is cheap, and what it exports exists."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hdruntime
import hdruntime.errors

HEAVY = [
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "pyarrow",
    "tensorrt",
    "tensorrt_rtx",
    "tokenizers",
    "torch",
    "transformers",
]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_runtime_imports_nothing_heavy() -> None:
    loaded = run("import sys, hdruntime; print(*sorted(m.partition('.')[0] for m in sys.modules))").split()
    assert "hdruntime" in loaded
    assert not set(HEAVY) & set(loaded)


def test_running_a_bundle_needs_neither_torch_nor_transformers_nor_onnx(bundle_path: object) -> None:
    blocked = [
        "torch",
        "transformers",
        "onnx",
        "onnx_ir",
        "onnxscript",
        "pyarrow",
        "tensorrt",
        "tensorrt_rtx",
    ]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))  # None: importing one raises
import hdruntime
with hdruntime.load({str(bundle_path)!r}) as session:
    print(session.embed(["long documents"]).shape)
with hdruntime.SentenceEncoder({str(bundle_path)!r}) as encoder:
    print(encoder.encode("long documents", show_progress_bar=True).shape)
"""
    assert run(code) == "(1, 4)\n(4,)\n"


def test_importing_the_runtime_imports_no_package_but_numpy() -> None:
    """What takes long to import is imported where it is used."""
    code = """
import sys
before = set(sys.modules)
import hdruntime, hdruntime.session
hdruntime.load, hdruntime.open_bundle
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(names - sys.stdlib_module_names))
"""
    assert run(code) == "['hdruntime', 'numpy']\n"


@pytest.mark.parametrize("name", hdruntime.__all__)
def test_every_exported_name_exists(name: str) -> None:
    assert getattr(hdruntime, name) is not None
    assert name in dir(hdruntime)


def test_every_error_is_exported() -> None:
    assert set(hdruntime.errors.__all__) <= set(hdruntime.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'hdruntime' has no attribute 'nothing'"):
        _ = hdruntime.nothing
