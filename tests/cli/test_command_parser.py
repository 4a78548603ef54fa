"""The command line as users type it: misspelt, in any order, begun, and completed by the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hdexport as hdexport_package
import hdruntime
from hdexport.cli import COMMANDS, parser
from support.commands import Command
from support.grids import nightly_unless
from support.tiny_bundle import make_bundle

BIN = Path(sys.executable).parent


MISSPELT = [
    ("build m --max-length 99", "unrecognized arguments: --max-length\nDid you mean --max-len?\nSee: {build}"),
    ("build m --max_len=99", "unrecognized arguments: --max_len\nDid you mean --max-len?\nSee: {build}"),
    ("build -fp16 m", "unrecognized arguments: -fp16\nDid you mean --fp16?\nSee: {build}"),
    ("extend m --maxlen 99 -o x", "unrecognized arguments: --maxlen\nDid you mean --max-len?\nSee: {extend}"),
    ("verify b --zzz", "unrecognized arguments: --zzz\nSee: {verify}"),
    ("inspect a b", "unrecognized arguments: b\nSee: {inspect}"),
    (
        "biuld m",
        "argument COMMAND: invalid choice: biuld (choose from {commands})\nDid you mean build?\nSee: {top}",
    ),
    ("--verion", "unrecognized arguments: --verion\nDid you mean --version?\nSee: {top}"),
    ("", "the following arguments are required: COMMAND\nSee: {top}"),
    ("run --ray=here b in.txt -o out.jsonl", "argument --ray: here is not auto or host:port\nSee: {run}"),
]
"""Command line -> what is said of it."""


def test_what_is_misspelt_is_answered_with_what_was_meant_and_the_commands_own_help(hdexport: Command) -> None:
    helps = {name: f"hdexport {name} --help" for name in COMMANDS}
    for line, message in MISSPELT:
        done = hdexport(*line.split())
        expected = message.format(commands=", ".join(COMMANDS), top="hdexport --help", **helps)
        # Python's releases quote the choices or not.
        said = (done.returncode, done.stdout, done.stderr.replace("'", ""))
        assert said == (1, "", f"error: {expected}\n"), line


def test_options_may_stand_before_and_between_what_they_belong_to() -> None:
    for line in (
        "run b 1.txt 2.txt -o out.jsonl --ray",
        "run b --ray 1.txt -o out.jsonl 2.txt",
        "run -o out.jsonl b 1.txt --ray= 2.txt",
        "run --ray -o out.jsonl b 1.txt 2.txt",
        "run -o out.jsonl --ray -- b 1.txt 2.txt",
    ):
        words = line.split()
        options = parser(words).parse_args(words)
        found = (options.ray, options.bundle, options.inputs, options.output)
        assert found == ("", "b", ["1.txt", "2.txt"], "out.jsonl"), line


def test_the_address_of_a_cluster_is_distinguished_from_a_bundle() -> None:
    for form, address in (("--ray {}", "auto"), ("--ray {}", "head:6379"), ("--ray={}", "10.0.0.1:6379")):
        words = f"run {form.format(address)} b 1.txt -o out.jsonl".split()
        options = parser(words).parse_args(words)
        assert (options.ray, options.bundle) == (address, "b")


def test_logging_is_set_before_or_after_the_command(hdexport: Command, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    for line in ("-v inspect {}", "inspect {} --verbose", "--debug inspect {}"):
        words = line.format(bundle).split()
        assert parser(words).parse_args(words).__dict__.keys() & {"verbose", "debug"}, line
        assert hdexport(*words).returncode == 0, line


def test_the_module_is_the_command_and_all_tell_one_version(installed: Command) -> None:
    module = [sys.executable, "-m", "hdexport", "--version"]
    shown = [installed("--version").stdout, subprocess.run(module, capture_output=True, text=True, check=True).stdout]
    assert shown == [f"hdexport {hdruntime.__version__}\n"] * 2
    assert hdexport_package.__version__ == hdruntime.__version__


# Completion

COMPLETE = """
eval "$(register-python-argcomplete hdexport)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete hdexport
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""The line that docs/cli.md gives, and what bash does when somebody presses the tab key at the end of ``$1``."""


def completions(line: str, folder: Path) -> set[str]:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", line], capture_output=True, text=True, check=True, env=environment, cwd=folder
    )
    assert done.stderr == ""
    return {word.strip() for word in done.stdout.splitlines()} - {""}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hdexport re", {"rebuild"}),
        ("hdexport build model --target ", {"auto", "onnx", "tensorrt", "tensorrt-rtx"}),
        ("hdexport inspect my", {"my-bundle/"}),
    ],
)
def test_the_shell_completes_commands_options_values_and_paths(tmp_path: Path, line: str, words: set[str]) -> None:
    (tmp_path / "my-bundle").mkdir()
    found = completions(line, tmp_path)
    assert found >= words
    assert all(word.startswith(line.rpartition(" ")[2]) for word in found)


@pytest.mark.parametrize("command", [nightly_unless(command == "build", command) for command in COMMANDS])
def test_every_option_of_a_command_is_completed(command: str, tmp_path: Path) -> None:
    declared = parser([command])._subparsers._group_actions[0].choices[command]._option_string_actions  # type: ignore
    assert completions(f"hdexport {command} --", tmp_path) == {name for name in declared if name.startswith("--")}
