"""Commands in messages: their options are there, and a folder with a blank in its name is one word of them."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hdexport
import hdplugins
import hdruntime
from hdexport.cli import COMMANDS
from hdexport.cli.flags import flag
from hdruntime.bundle.manifest import Task
from hdruntime.errors import Setting
from support.comparators import named_case
from support.named_options import missing_options
from support.tiny_models import save_tiny_model

PACKAGES = [Path(package.__file__ or "").parent for package in (hdexport, hdruntime, hdplugins)]


@pytest.mark.parametrize(
    ("message", "command", "missing"),
    [
        ("Cut it: --overflow truncate", "run", []),
        ("Cut it: --overflow truncate", "build", ["--overflow"]),
        ("Cut it (--overflow truncate), or rebuild with --max-len 10.", "run", ["--max-len"]),
        ("Cut it (--overflow truncate), or build the bundle again with --max-len 10.", "run", []),
        ("Rebuild the engine with --profiles 1:2:3.", "serve", []),
        ("Build it before: hdexport rebuild /bundle --task fill-mask", "run", ["--task"]),
        ("See hdexport run --help.\\nUse --colour.", None, ["--colour"]),
        ("The bundle was built with --int8 from a BERT; name it with --model.", "verify", []),
        ("--max-leng is unknown.", "build", ["--max-leng"]),
        ("pip install --force-reinstall triton", "build", []),
    ],
)
def test_options_that_a_command_lacks_are_found(message: str, command: str | None, missing: list[str]) -> None:
    assert missing_options(message, command=command) == missing


def test_an_option_of_the_command_line_may_be_repeated() -> None:
    assert missing_options("--max-leng is unknown.", command="build", given=["--max-leng"]) == []


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """The line and text of every sentence of a module that is no docstring; values in it are X."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            docs.update(map(id, ast.walk(node)))
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            if " " in text:
                yield node.lineno, text
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in docs
        ):
            yield node.lineno, node.value


def test_every_message_names_options_of_the_command_that_it_names() -> None:
    wrong = [
        f"{path}:{line}: {', '.join(missing)}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        for line, message in messages(path)
        if (missing := missing_options(message))
    ]
    assert not wrong, "\n".join(wrong)


def settings(source: str) -> Iterator[tuple[int, Setting]]:
    """The line and setting of every `Setting` that a module makes, as far as its words are constant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Setting"):
            name = node.args[0]
            command = next((word.value for word in node.keywords if word.arg == "command"), ast.Constant(""))
            is_off = any(isinstance(value, ast.Constant) and value.value in (False, None) for value in node.args[1:2])
            if isinstance(name, ast.Constant) and isinstance(command, ast.Constant):
                yield node.lineno, Setting(str(name.value), False if is_off else ..., command=str(command.value))


def unknown_flag(setting: Setting) -> list[str]:
    """The flag of a setting, if its command lacks it; without a command, if every command does."""
    return missing_options(flag(setting), command=setting.command or None) if flag(setting)[:2] == "--" else []


def test_settings_that_no_flag_sets_are_found() -> None:
    source = 'InputError(hint=(Setting("max_length", 9, command="build"), Setting("stride"), Setting("max_len", 1)))'
    assert [unknown_flag(setting) for _, setting in settings(source)] == [["--max-length"], [], []]


def test_every_setting_in_a_message_is_a_flag_of_its_command() -> None:
    wrong = [
        f"{path}:{line}: {setting}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        for line, setting in settings(path.read_text())
        if unknown_flag(setting)
    ]
    assert not wrong, "\n".join(wrong)


_COMMAND = re.compile(rf"(?:hdexport (?:{'|'.join(COMMANDS)})|mkdir -p|\bcd|tritonserver)\b[^\n.;:]*$")


def unquoted(source: str) -> list[str]:
    """Values in a module's strings that follow a command and are not quoted for the shell."""
    found = []
    for node in ast.walk(ast.parse(source)):
        before = ""
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                value = ast.unparse(part.value)
                is_quoted = "shlex." in value or re.search(rf"\b{re.escape(value)} = .*shlex\.", source)
                if _COMMAND.search(before) and not is_quoted and not value.endswith(_NEVER_BLANK):
                    found.append(value)
                before += "X"
    return found


_NEVER_BLANK = (".value", "lengths[-1]", "architecture", "architectures")
"""Ends of expressions whose values are names of ours, or numbers."""


def test_values_that_are_not_quoted_are_found() -> None:
    source = """
place = shlex.quote(path)
f"Look inside: hdexport inspect {place}"
f"hdexport verify {bundle.path} --backend {backend.value}. See {path}."
f"Make it: mkdir -p {shlex.quote(str(output))}"
f"Fetch it: cd {file.parent} && git lfs pull"
"""
    assert unquoted(source) == ["bundle.path", "file.parent"]


def test_every_command_in_a_message_has_its_paths_quoted() -> None:
    # A model's card has names of the hub, and a backend a name, which have no blank.
    found = {
        str(path.relative_to(package)): values
        for package in PACKAGES
        for path in package.rglob("*.py")
        if (values := unquoted(path.read_text()))
    }
    assert found == {"publish/push.py": ["name"], "cli/verification_table.py": ["skip.backend"]}


def test_commands_in_errors_take_a_folder_with_a_blank(
    hdexport: Callable[..., Any], bundle: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "my models"
    shutil.copytree(bundle, folder / "bundle")
    shutil.copytree(checkpoint, folder / "checkpoint")
    computed, pointer = folder / "computed", folder / "pointer"
    save_tiny_model(computed, "xlnet", Task.FEATURE_EXTRACTION)
    shutil.copytree(checkpoint, pointer)
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    rows, missing = tmp_path / "in.txt", folder / "no folder"
    rows.write_text("a text\n")
    given, output = folder / "bundle", tmp_path / "output"
    for arguments, words in [
        (["run", given, rows, "-o", missing / "out.jsonl"], ["mkdir", "-p", missing]),
        (["run", given, rows, "--ray", "--rebuild", "-o", f"{output}.jsonl"], ["hdexport", "rebuild", given]),
        (["verify", given], ["hdexport", "verify", given, "--model", "MODEL"]),
        (["extend", computed, "--max-len", 100, "-o", output], ["hdexport", "build", computed]),
        (["build", pointer, "--target", "onnx", "-o", output], ["cd", pointer, "&&", "git"]),
    ]:
        with named_case(arguments[0]):
            done = hdexport(*arguments)
            assert done.returncode == 1
            last = done.stderr.splitlines()[-1]
            assert shlex.split(last.rpartition(": ")[2])[: len(words)] == list(map(str, words))
