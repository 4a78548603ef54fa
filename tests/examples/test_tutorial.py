"""The tutorial's code runs as it is written, and finds what the tutorial says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.pages import CodeBlock, code_blocks, page
from support.sample_model import environment

BLOCKS = code_blocks(page("docs/tutorial.md"))


def run(block: CodeBlock, directory: Path) -> str:
    """What a block prints; a block with a title is saved and not run."""
    if block.title:
        (directory / block.title).write_text(block.code, encoding="utf-8")
        return ""
    command = ["bash", "-euo", "pipefail", "-c", block.code] if block.language == "sh" else ["python", "-c", block.code]
    done = subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def printed(sample_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each block's code -> what it printed, of all that come after the build."""
    directory = tmp_path_factory.mktemp("tutorial")
    (directory / "minilm").symlink_to(sample_bundle)
    (install, build), rest = BLOCKS[:2], BLOCKS[2:]
    assert "pip install" in install.code
    assert "hdexport build" in build.code
    return {block.code: run(block, directory) for block in rest if block.language != "text"}


def test_every_block_runs(printed: dict[str, str]) -> None:
    (collected,) = (text for code, text in printed.items() if code.startswith("python collect.py"))
    assert int(collected.split()[0]) > 40


def test_the_search_finds_what_the_page_shows(printed: dict[str, str]) -> None:
    (shown,) = (block.code for block in BLOCKS if block.language == "text")
    (found,) = (text for code, text in printed.items() if code.startswith("python search.py"))
    # Later places depend on the version of Python, whose texts these are.
    assert found.splitlines()[0].split()[1] == shown.splitlines()[0].split()[1] == "class,"


def test_duckdb_finds_the_same(printed: dict[str, str]) -> None:
    (found,) = (text for code, text in printed.items() if "duckdb" in code)
    assert found.startswith("[('class',)")
