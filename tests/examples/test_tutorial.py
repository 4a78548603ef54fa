"""The tutorial's code runs as it is written, and finds what the tutorial says."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from support.commands import run_here
from support.pages import CodeBlock, code_blocks, page
from support.sample_model import build_of_the_tutorial, environment

BLOCKS = code_blocks(page("docs/tutorial.md"))
INSTALL, BUILD, *REST = BLOCKS

FOUND = ("class", "specialattrs", "callable-types")
"""What the page's search shows, the best first."""

BY_LENGTH = sorted(topics, key=lambda name: len(topics[name]))
FEW = {*FOUND, *BY_LENGTH[:9], BY_LENGTH[-1]}
"""Topics of a Python that has few; the longest has more characters than the tutorial takes."""


def run_line(line: str, directory: Path) -> str:
    """What a command of the page prints, run in this process."""
    program, *words = shlex.split(line)
    if program == "hdexport":
        done = run_here(*words, cwd=directory)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        return done.stdout
    assert program == "python"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.chdir(directory)
        patch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
    return text.getvalue()


def run_in_a_process(block: CodeBlock, directory: Path) -> str:
    command = ["bash", "-euo", "pipefail", "-c", block.code] if block.language == "sh" else ["python", "-c", block.code]
    done = subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run(block: CodeBlock, directory: Path) -> str:
    """What a block prints; a block with a title is saved and not run."""
    if block.title:
        (directory / block.title).write_text(block.code, encoding="utf-8")
        return ""
    if block.language == "python":
        # A process of its own: DuckDB complains at the end of this one, which has frozen its garbage.
        return run_in_a_process(block, directory)
    return "".join(run_line(line, directory) for line in block.code.splitlines())


@pytest.fixture(scope="module")
def printed(sample_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each block's code -> what it printed, of all that come after the build."""
    directory = tmp_path_factory.mktemp("tutorial")
    (directory / "minilm").symlink_to(sample_bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pydoc_data.topics.topics", {name: topics[name] for name in FEW})
        return {block.code: run(block, directory) for block in REST if block.language != "text"}


def test_the_first_blocks_install_and_build() -> None:
    assert "pip install" in INSTALL.code
    assert BUILD.code.strip() == build_of_the_tutorial()


def test_every_block_runs(printed: dict[str, str]) -> None:
    (collected,) = (text for code, text in printed.items() if code.startswith("python collect.py"))
    assert collected == f"{len(FEW) - 1} documents\n"


def test_the_search_finds_what_the_page_shows(printed: dict[str, str]) -> None:
    (shown,) = (block.code for block in BLOCKS if block.language == "text")
    (found,) = (text for code, text in printed.items() if code.startswith("python search.py"))
    assert tuple(line.split()[1].rstrip(",") for line in shown.splitlines()) == FOUND
    # Later places depend on the version of Python, whose texts these are.
    assert found.splitlines()[0].split()[1] == "class,"


def test_duckdb_finds_the_same(printed: dict[str, str]) -> None:
    (found,) = (text for code, text in printed.items() if "duckdb" in code)
    assert found.startswith("[('class',)")


@pytest.mark.nightly
def test_every_block_runs_as_it_is_typed_and_the_build_is_verified(tmp_path: Path) -> None:
    """With all topics, in processes; an engine would double the time, and the page installs nothing that builds one."""
    build = BUILD._replace(code=f"{build_of_the_tutorial()} --target onnx")
    assert re.search(r"^model\.onnx +float32 +PASS ", run_in_a_process(build, tmp_path), re.MULTILINE)
    for block in REST:
        if block.title:
            run(block, tmp_path)
        elif block.language != "text":
            found = run_in_a_process(block, tmp_path)
            assert "search.py" not in block.code or found.splitlines()[0].split()[1] == "class,"
