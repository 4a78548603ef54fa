"""findings/: the form of its programs, which run outside CI, and the page that is made of their comments."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "readme.py"))


def test_the_page_is_what_the_comments_say(readme: dict[str, Any]) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert page == readme["page"](), "run `python findings/readme.py`"
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in links if not (FOLDER / link).is_file()] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_program_has_the_form_of_all(script: Path, readme: dict[str, Any]) -> None:
    text = script.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert os.access(script, os.X_OK)
    assert lines[0] == "#!/usr/bin/env bash"
    # The first command.
    assert next(line for line in lines if not line.startswith("#")) == "set -euo pipefail"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert max(map(len, lines)) <= 130
    found = readme["fields"](text)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["Seen"])
    assert re.search(r"\d+\.\d+", found["Library"])
    commands = "\n".join(line for line in lines if not line.startswith("#"))
    assert "hdexport" not in commands
    assert "folder=$(mktemp -d)\ntrap 'rm -rf \"$folder\"' EXIT\n" in commands


def requirements(script: str) -> list[str]:
    """What the pip commands of a script install."""
    found = []
    for command in re.findall(r'(?:bin/pip"|arm64") install (?:"\$folder/arm" )?([^;\n]*)', script.replace("\\\n", "")):
        found += [word.strip('"') for word in command.split() if not word.startswith(("-", '"$@'))]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_program_installs_pinned_versions(script: Path) -> None:
    installed = requirements(script.read_text(encoding="utf-8"))
    assert installed
    assert [each for each in installed if not re.fullmatch(r"[\w-]+==(\d[\w.+]*|\$version)", each)] == []
