"""The library name that TensorRT-RTX's wheel forgot: plugins are imported, and nothing is installed."""

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
import numpy as np
import onnx.parser
{before_import}
import tensorrt_rtx as trt
import tensorrt_rtx_libs
assert tensorrt_rtx_libs.__file__.startswith({installation!r}), tensorrt_rtx_libs.__file__


class Twice(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild):
    def __init__(self):
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuild.__init__(self)
        self.num_outputs = 1
        self.plugin_namespace, self.plugin_name, self.plugin_version = "", "Twice", "1"

    def get_capability_interface(self, kind):
        return self

    def get_output_data_types(self, types):
        return types

    def get_output_shapes(self, inputs, shape_inputs, builder):
        return [trt.DimsExprs(inputs[0])]

    def clone(self):
        return Twice()


class Creator(trt.IPluginCreatorV3One):
    def __init__(self):
        trt.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_namespace, self.plugin_version = "Twice", "", "1"
        self.field_names = trt.PluginFieldCollection([])

    def create_plugin(self, name, fields, phase):
        return Twice()


creator = Creator()
trt.get_plugin_registry().register_creator(creator, "")
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
model = onnx.parser.parse_model('''
    <ir_version: 10, opset_import: ["": 20, "custom": 1]>
    graph (float[2] x) => (float[2] y) {{ y = custom.Twice(x) }}
''')
assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
kinds = [network.get_layer(index).type for index in range(network.num_layers)]
assert trt.LayerType.PLUGIN_V3 in kinds, kinds
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
    script = _SCRIPT.format(installation=str(installation), before_import=before_import)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


def test_plugins_are_imported_without_writing_into_the_installation(bare_installation: Path) -> None:
    before = sorted(bare_installation.rglob("*.so*"))
    for folder in (bare_installation / "tensorrt_rtx_libs", bare_installation):
        folder.chmod(0o555)
    result = _run(bare_installation, _OURS)
    assert result.stdout.strip() == "imported", result.stderr
    assert sorted(bare_installation.rglob("*.so*")) == before


def test_without_the_link_the_process_dies(bare_installation: Path) -> None:
    """The flaw itself: once it is mended in the wheel, this fails and the link can go."""
    result = _run(bare_installation, "")
    assert result.returncode < 0, result.stdout
    assert "terminate called" in result.stderr


def test_a_link_that_comes_too_late_says_so(bare_installation: Path) -> None:
    result = _run(bare_installation, _TOO_LATE)
    assert result.stdout.strip() == "too late", result.stderr


def test_no_directory_of_links_is_left_behind(bare_installation: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = _SCRIPT.format(installation=str(bare_installation), before_import=_OURS)
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(temporary)}, check=True, timeout=120
    )
    assert list(temporary.iterdir()) == []
