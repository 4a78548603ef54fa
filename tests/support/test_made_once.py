"""A shared thing is made by the first caller, and by the next one if that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.made_once import made_once, sources_digest


def test_the_second_who_asks_gets_what_the_first_made(tmp_path_factory: pytest.TempPathFactory) -> None:
    made: list[Path] = []

    def make(directory: Path) -> None:
        made.append(directory)
        (directory / "file").write_text("content")

    first, second = (made_once(tmp_path_factory, "test-once", make) for _ in range(2))
    assert first == second
    assert made == [first]
    assert [path.name for path in first.iterdir()] == ["file"]


def test_what_could_not_be_made_is_made_by_the_next(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise ValueError("no more paper")

    for _ in range(2):
        with pytest.raises(ValueError, match="no more paper"):
            made_once(tmp_path_factory, "test-failing", fail)
    directory = made_once(tmp_path_factory, "test-failing", lambda directory: (directory / "whole").touch())
    assert [path.name for path in directory.iterdir()] == ["whole"]


def test_what_is_kept_is_made_anew_after_a_change_of_what_builds_read(tmp_path: Path) -> None:
    build, command = tmp_path / "exporter/hdexport/graph/tracing.py", tmp_path / "exporter/hdexport/cli/build.py"
    for file in (build, command, *(tmp_path / "tests" / name for name in SOURCES_OF_TESTS)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    before = sources_digest(tmp_path)
    command.write_text("after")
    assert sources_digest(tmp_path) == before
    build.write_text("after")
    assert sources_digest(tmp_path) != before


SOURCES_OF_TESTS = ("exporter/conftest.py", "support/hugging_face.py", "support/tiny_models.py")
