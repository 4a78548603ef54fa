"""The library name that is missing from TensorRT-RTX's wheel: plugins are imported, and nothing is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import sys
sys.path.insert(0, {installation!r})
import onnx.parser
{before_import}
import tensorrt_rtx as trt
import tensorrt_rtx_libs
from hdplugins.tensorrt.plugins import plugins_with_kernels
assert tensorrt_rtx_libs.__file__.startswith({installation!r}), tensorrt_rtx_libs.__file__
model = onnx.parser.parse_model('''
    <ir_version: 10, opset_import: ["": 20, "hdexport": 2]>
    graph (float16[1, 9, 2, 32] q, float16[1, 9, 2, 32] k, float16[1, 9, 2, 32] v, int32[1, 9] kinds)
        => (float16[1, 9, 2, 32] y) {{
        y = hdexport.SlidingWindowAttention <
            left = 1, right = 1, dilation = [1], global_bound = 0, scale = 1.0,
            plugin_namespace = "hdexport", plugin_version = "2"
        > (q, k, v, kinds)
    }}
''')
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
with plugins_with_kernels(trt, None):
    assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
assert network.get_layer(0).type == trt.LayerType.PLUGIN_V3
print("imported")
"""

_OURS = "from hdplugins.tensorrt.link import provide_library_link; assert provide_library_link()"
_TOO_LATE = "import tensorrt_rtx\nfrom hdplugins.tensorrt.link import provide_library_link\n" + (
    "assert not provide_library_link(); print('too late'); sys.exit()"
)


@pytest.fixture
def bare_installation(tmp_path: Path) -> Path:
    """A folder that holds the wheel's libraries as they are shipped: without the link."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or spec.origin is None or sys.platform != "linux":
        pytest.skip("the libraries of TensorRT-RTX's Linux wheel are not installed")
    package = tmp_path / "installation" / "tensorrt_rtx_libs"
    package.mkdir(parents=True)
    shutil.copy(spec.origin, package)
    for library in Path(spec.origin).parent.glob("*.so.*"):
        try:
            os.link(library, package / library.name)
        except OSError:  # the temporary directory is on another disk
            shutil.copy(library, package)
    return package.parent


def _run(installation: Path, before_import: str) -> subprocess.CompletedProcess[str]:
    """The script, in a process whose temporary directory is beside the installation."""
    script = _SCRIPT.format(installation=str(installation), before_import=before_import)
    temporary = installation.with_name("temporary")
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)


def test_plugins_are_imported_without_writing_into_the_installation_or_leaving_links(bare_installation: Path) -> None:
    before = sorted(bare_installation.rglob("*.so*"))
    for folder in (bare_installation / "tensorrt_rtx_libs", bare_installation):
        folder.chmod(0o555)
    result = _run(bare_installation, _OURS)
    assert result.stdout.strip() == "imported", result.stderr
    assert sorted(bare_installation.rglob("*.so*")) == before
    assert list(bare_installation.with_name("temporary").iterdir()) == []


def test_without_the_link_the_process_dies(bare_installation: Path) -> None:
    """The fault itself: once the wheel is fixed, this fails and the link can go."""
    result = _run(bare_installation, "")
    assert result.returncode < 0, result.stdout
    assert "terminate called" in result.stderr


def test_a_link_that_comes_too_late_is_reported(bare_installation: Path) -> None:
    result = _run(bare_installation, _TOO_LATE)
    assert result.stdout.strip() == "too late", result.stderr
