"""Errors in the source say what is accepted or what to do next."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hdexport
import hdplugins
import hdruntime
from hdruntime import errors

_PACKAGES = [Path(package.__file__ or "").parent for package in (hdexport, hdruntime, hdplugins)]
_STEP = re.compile(
    r"\n|\{(?:explained|remedy|hint|advice|REPLACEMENTS|_SHAPES|_what_fits)"
    r"|\b(?:must (?:be|have)|[Gg]ive|[Uu]se|[Ll]eave|[Nn]ame some|Name|Send|Decode|Remove|Start over|[Cc]opy it"
    r"|valid are|Try again|accepts|takes \{|needs all of|load the bundle again|are \{|it is error|ports are|or 0 for)\b"
)
"""Words by which a message of one line says what is accepted, or what to do next."""

_ELSEWHERE = {
    "hdexport/bench/baselines": "reasons in a table, beside what was measured",
    "hdexport/bench/run/worker.py": "reasons in a table, beside what was measured",
    "hdexport/bench/corpus/peers.py": "reasons in a table, beside what was measured",
    "hdruntime/jobs": "tests/runtime/jobs has the messages of jobs",
    "hdruntime/serve": "tests/runtime/test_serve.py has the messages of a server",
    "The question has no tokens": "the error of a row",
    "The ids lack special tokens": "callers say how to give ids",
}
"""A path or the beginning of a message -> why it has no step of its own."""


def errors_in(source: str) -> Iterator[tuple[int, str]]:
    """The line and the problem of each error without a hint, and with words of its own; values in it are in braces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in errors.__all__:
            if any(word.arg == "hint" for word in node.keywords):
                continue
            text = "".join(map(_text, node.args))
            # An error of other errors' words, or of a function's, has their steps.
            if re.search(r"\w+ \w+", re.sub(r"\{.*?\}", "", text)):
                yield node.lineno, text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{" + _name(node.value) + "}"
    return _text(node.left) + _text(node.right) if isinstance(node, ast.BinOp) else "{" + _name(node) + "}"


def _name(node: ast.expr) -> str:
    return re.sub(r"[{}\n]", "", ast.unparse(node))


@pytest.mark.parametrize("package", _PACKAGES, ids=lambda package: package.name)
def test_errors_have_a_next_step(package: Path) -> None:
    without = [
        f"{name}:{line}: {text}"
        for file in sorted(package.rglob("*.py"))
        if (name := file.relative_to(package.parent).as_posix())
        for line, text in errors_in(file.read_text())
        if not (_STEP.search(text) or name.startswith(tuple(_ELSEWHERE)) or text.startswith(tuple(_ELSEWHERE)))
    ]
    assert not without, "\n".join(without)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise InputError("It is not there.")', ["It is not there."]),
        ('raise errors.ModelError(f"{path} is gone" + f": {why}")', ["{path} is gone: {why}"]),
        ('raise InputError(f"{error}")', []),
        ('raise ValueError("It is not there.")', []),
        ('raise InputError("It is not there.", hint="Make it.")', []),
        ('raise InputError(Setting("stride"), " is not there.")', ["{Setting('stride')} is not there."]),
    ],
)
def test_errors_are_found_in_the_source(source: str, found: list[str]) -> None:
    assert [text for _, text in errors_in(source)] == found


@pytest.mark.parametrize("text", ["It is not there.", "{path} has {count} values.", "It cannot be used."])
def test_a_message_without_a_step_is_found(text: str) -> None:
    assert not _STEP.search(text)
