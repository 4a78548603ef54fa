"""The bundle that the tutorial builds; the examples use it as well."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from support.made_once import made_once
from support.pages import page
from support.sample_model import environment


@pytest.fixture(scope="session")
def sample_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tutorial's own command builds. Not to be changed."""
    (command,) = re.findall(r"^hdexport build .* -o minilm$", page("docs/tutorial.md"), re.MULTILINE)

    def build(directory: Path) -> None:
        # An engine would double the time, and the tutorial installs no package that builds one.
        words = [*shlex.split(command), "--target", "onnx"]
        done = subprocess.run(words, cwd=directory, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "sample-bundle", build) / "minilm"
