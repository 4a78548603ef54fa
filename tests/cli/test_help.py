"""`--help` needs none of the optional packages, which is why it is quick, and is what docs/cli.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hdexport.cli import COMMANDS
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.openvino.runner import OpenVinoRunner
from support.commands import HDEXPORT

DOCS = Path(__file__).parents[2] / "docs"

BLOCKED = """
import sys

class Blocker:
    names = {"argcomplete", "huggingface_hub", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "polygraphy",
             "pyarrow", "ray", "safetensors", "tensorrt", "tensorrt_rtx", "tokenizers", "torch", "transformers"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which no optional package, and not even numpy, can be imported."""
    path = tmp_path_factory.mktemp("blocked")
    (path / "sitecustomize.py").write_text(BLOCKED)
    return os.environ | python_path(path) | {"COLUMNS": "100"}


def python_path(folder: Path) -> dict[str, str]:
    """The variable that puts a folder before what this process imports from."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


HELP_OF_EACH = """
import contextlib, io, json, sys
from hdexport.cli import COMMANDS, main
shown = {}
for name in ("", *COMMANDS):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    shown[name] = text.getvalue()
    # The list of commands comes before anything of a bundle, a GPU or another package is looked at.
    assert name or not {"ctypes", "importlib.metadata", "msgspec"} & {*sys.modules}
print(json.dumps(shown))
"""


def test_help_needs_no_optional_package(bare_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_EACH], capture_output=True, text=True, timeout=600, env=bare_environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert list(shown) == ["", *COMMANDS]
    for name, text in shown.items():
        assert text.startswith(f"usage: hdexport {name} ".replace("  ", " ")), name


def test_completion_needs_no_package_but_argcomplete(bare_environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.replace('"argcomplete", ', ""))
    line, answer = "hdexport build --target on", tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer)} | python_path(tmp_path)
    done = subprocess.run([HDEXPORT], capture_output=True, text=True, timeout=60, env=bare_environment | asked)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert answer.read_text().strip() == "onnx"


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    bare_environment: dict[str, str], checkpoint: Path, tmp_path: Path
) -> None:
    # As on a machine that only runs bundles: numpy is there, torch is not.
    without_torch = tmp_path / "sitecustomize.py"
    without_torch.write_text(BLOCKED.replace('"numpy", ', ""))
    environment = bare_environment | python_path(tmp_path)
    command = [HDEXPORT, "build", str(checkpoint), "--target", "onnx", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install 'hdexport[export]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_help_names_the_batch_of_a_cpu() -> None:
    assert OnnxRuntimeRunner.batch_tokens == OpenVinoRunner.batch_tokens
    assert f"{OnnxRuntimeRunner.batch_tokens} on a CPU" in (DOCS / "cli.md").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse words help differently in other Python versions")
def test_the_reference_is_what_the_commands_say(tmp_path: Path) -> None:
    written = DOCS / "cli.md"
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['reference'](), end='')"
    command = [sys.executable, "-c", code, str(DOCS / "generate_cli.py")]
    generated = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    assert written.read_text(encoding="utf-8") == generated, "run: python docs/generate_cli.py"
