"""Odd values of every argument of every command: an error that says what to do next, and never a traceback."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hdexport.cli import COMMANDS, parser
from support.bound_permissions import permissions_bind
from support.commands import run_here
from support.grids import nightly_unless

_PATHS = ("model", "output", "bundle", "bundles", "inputs", "corpus", "name", "texts", "calibrate", "triton", "compare")
"""Destinations of arguments that are paths, URLs or names of the hub, beside those of ``local_path``."""

_LEFT_OUT = {
    ("run", "inputs"): "tests/runtime/jobs has them",
    ("run", "output"): "tests/runtime/jobs has them",
    ("run", "input_format"): "tests/runtime/jobs has files of a wrong format",
    ("run", "ray"): "tests/runtime/test_ray.py has addresses, which are waited for",
    ("run", "threads"): "thousands of threads start",
    ("serve", "threads"): "thousands of threads start",
}
"""Command and destination -> why no odd value is tried."""

_NUMBERS = (
    "0",
    "-1",
    str(2**31),
    str(2**63),
    str(2**70),
    "9" * 5000,
    "1e999",
    "nan",
    "-inf",
    "1.5",
    "",
    "word",
    " ",
    "1,2",
)

_TEXTS = (
    *("", ",", "1,", "0", "-1", "a,b", "1:2:3", "1:2:x0", "5:1:x2", "1:9999999999:+1", "1;2", "nan", "none", "x" * 300),
    *(
        "ntk:4",
        "1e999GB",
        "-1GB",
        "input_ids:",
        "tokens:0",
        f"tokens:{2**70}",
        "a\nb",
        "\0",
        "💥",
        str(2**70),
        "9" * 5000,
    ),
)

_EVERY_RUN = 6
"""Values of an argument that every run tries: others for each argument."""

_WAITS_SECONDS = 60


class _Accepted(BaseException):
    """The command would begin its work now."""


@dataclass(frozen=True)
class _Outcome:
    words: tuple[str, ...]
    code: int | None
    message: str

    @property
    def fault(self) -> str | None:
        """Why no user could go on after this; None for a command that was accepted, or refused with a hint."""
        if self.code in (0, None) or (self.code == 2 and "The column `error` says why" in self.message):
            return None
        if self.code != 1:
            return f"exit code {self.code}"
        _, found, said = self.message.partition("error: ")
        if not found or "Traceback" in said:
            return "no error"
        lines = [line for line in said.splitlines() if line.strip()]
        if "[Errno" in said or "--debug" in lines[-1]:
            return "the words of the operating system alone"
        return "no hint" if len(lines) < 2 and "; it must be " not in said else None


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Kind -> a path, a URL or a name of that kind."""
    folder = tmp_path_factory.mktemp("odd")
    return {name: str(path) for name, path in _odd_places(folder)}


def _odd_places(folder: Path) -> Iterator[tuple[str, Path | str]]:
    yield "missing", folder / "missing"
    yield "below a missing folder", folder / "missing" / "below"
    yield "a name too long", folder / ("n" * 300)
    yield "a path too long", folder / ("n/" * 3000)
    yield "a NUL", f"{folder}/a\0b"
    (folder / "file").write_text("one\n")
    yield "a file of no ending", folder / "file"
    yield "below a file", folder / "file" / "below"
    for name, content in (
        ("empty.txt", b""),
        ("bytes.jsonl", bytes(range(256))),
        (os.fsdecode(b"caf\xe9.txt"), b"a\n"),
    ):
        (folder / name).write_bytes(content)
        yield name, folder / name
    yield "a missing name that is not UTF-8", folder / os.fsdecode(b"caf\xe8")
    (folder / "forbidden.txt").write_text("a\n")
    (folder / "forbidden.txt").chmod(0)
    yield "a file without permission", folder / "forbidden.txt"
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0)
    yield "a folder without permission", folder / "closed"
    yield "below a folder without permission", folder / "closed" / "a.txt"
    (folder / "read-only").mkdir()
    (folder / "read-only").chmod(0o555)
    yield "in a read-only folder", folder / "read-only" / "new"
    (folder / "empty").mkdir()
    yield "an empty folder", folder / "empty"
    for name, put in _ODD_ENTRIES.items():
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text("a\n" * 20)
        put(folder / name / "b.txt")
        yield f"a folder with {name}", folder / name
    for name in ("a dangling link", "a link to itself", "a pipe", "a socket"):
        _ODD_ENTRIES[name](folder / f"{name}.jsonl")
        yield name, folder / f"{name}.jsonl"
    yield from ((device, device) for device in ("/dev/null", "/dev/zero", "/dev/null/x"))
    schemes = ("s3", "https", "hf", "ftp", "nothing")
    yield from ((scheme, f"{scheme}://nowhere.invalid/a.jsonl") for scheme in schemes)
    names = ("", " ", "\n", "*", "[", "~nobody", "nobody/nothing", "nobody/nothing@v9", "a@b", "a/b/c", "%s")
    yield from ((repr(name), name) for name in names)


def _forbidden_file(path: Path) -> None:
    path.write_text("b\n")
    path.chmod(0)


def _forbidden_folder(path: Path) -> None:
    path.mkdir()
    (path / "c.txt").write_text("c\n")
    path.chmod(0)


def _socket(path: Path) -> None:
    # A socket that is bound has a path of 108 bytes at most.
    os.mknod(path, stat.S_IFSOCK | 0o600)


_ODD_ENTRIES: dict[str, Callable[[Path], None]] = {
    "a file without permission": _forbidden_file,
    "a folder without permission": _forbidden_folder,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to the folder": lambda path: path.symlink_to(path.parent),
    "a pipe": os.mkfifo,
    "a socket": _socket,
}
"""Entries of a folder that a command was given and cannot read."""


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes long or leaves the machine ends the command as accepted."""
    import huggingface_hub
    import uvicorn

    import hdexport.bench.run.rounds
    import hdexport.pipeline.run
    import hdexport.publish.push
    import hdexport.quality.measurement
    import hdexport.rebuild
    import hdexport.tune.run
    import hdexport.verify

    def accept(*_: Any, **__: Any) -> None:
        raise _Accepted

    # By their names: `hdexport.rebuild` and others are also names of functions.
    for module, name in (
        ("hdexport.pipeline.run", "portable_graph"),
        ("hdexport.rebuild", "read_portable_graph"),
        ("hdexport.tune.run", "make_student"),
        ("hdexport.verify", "verify_bundle"),
        ("hdexport.quality.measurement", "_scores"),
        ("hdexport.publish.push", "_committed"),
    ):
        monkeypatch.setattr(sys.modules[module], name, accept)
    monkeypatch.setattr(hdexport.bench.run.rounds.Bench, "prepare", accept)
    monkeypatch.setattr(uvicorn.Server, "run", accept)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 12 texts that are longer than the tiny model's positions."""
    folder = tmp_path_factory.mktemp("texts")
    for text in range(12):
        sentences = (f"This is the sentence number {number} of the text {text} in a row." for number in range(30))
        (folder / f"{text}.txt").write_text(" ".join(sentences))
    return folder


def _command_line(command: str, bundle: Path, checkpoint: Path, texts: Path, output: Path) -> dict[str, list[object]]:
    """Destination -> the words of it in a command line that is right; "" has the words of all others."""
    return {
        "build": {"": ["--target", "onnx", "--max-len", 100], "model": [checkpoint], "output": ["-o", output]},
        "rebuild": {"": ["--target", "openvino"], "bundle": [bundle], "output": ["-o", output]},
        "extend": {"model": [checkpoint], "max_len": ["--max-len", 100], "output": ["-o", output]},
        "tune": {
            "model": [checkpoint],
            "texts": ["--texts", texts],
            "max_len": ["--max-len", 100],
            "output": ["-o", output],
            "steps": ["--steps", 1],
        },
        "inspect": {"bundle": [bundle]},
        "verify": {"bundle": [bundle]},
        "run": {"bundle": [bundle], "inputs": [output.with_name("rows.jsonl")], "output": ["-o", f"{output}.jsonl"]},
        "serve": {"bundle": [bundle], "port": ["--port", 0]},
        "quality": {"bundles": [bundle], "texts": ["--texts", texts]},
        "bench": {"": ["--peers", "none"], "bundles": [bundle], "output": ["-o", output]},
        "package": {"": ["--for", "triton"], "bundle": [bundle], "output": ["-o", output]},
        "push": {"bundle": [bundle], "name": ["nobody/nothing"]},
    }.get(command, {})


def _arguments(command: str) -> list[argparse.Action]:
    commands = parser(COMMANDS)._subparsers
    assert commands is not None
    (choices,) = (action.choices for action in commands._group_actions)
    of_command: argparse.ArgumentParser = dict(choices or {})[command]
    left_out = ("help", "verbose", "debug", "help_attention", "version")
    return [action for action in of_command._actions if action.dest not in left_out and action.nargs != 0]


def _odd_values(action: argparse.Action, odd: Mapping[str, str]) -> list[str]:
    if action.choices:
        return ["", "nothing"]
    is_path = action.dest in _PATHS or getattr(action.type, "__name__", "") in ("local_path", "path_or_url")
    if is_path:
        return list(odd.values())
    return list(_NUMBERS if action.type is not None else (*_TEXTS, *(odd[name] for name in ("missing", "a pipe"))))


def _words(line: Mapping[str, list[object]], action: argparse.Action, value: str) -> list[object]:
    """The words of a command line whose argument has another value."""
    of_value: list[object] = [value] * (action.nargs if isinstance(action.nargs, int) else 1)
    if action.option_strings:
        name = action.option_strings[-1]
        of_value = [f"{name}={value}"] if len(of_value) == 1 else [name, *of_value]
    return [word for words in ({"": []} | line | {action.dest: of_value}).values() for word in words]


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """A command that waits for a pipe would wait forever."""

    def stop(*_: object) -> None:
        raise AssertionError("the command waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_WAITS_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _outcome(words: list[object], cwd: Path) -> _Outcome:
    shown = tuple(f"{word!s:.80}" for word in words)
    try:
        with permissions_bind(), _no_waiting():
            done = run_here(*words, cwd=cwd)
    except _Accepted:
        return _Outcome(shown, None, "")
    except Exception as error:  # whatever no command should raise
        return _Outcome(shown, -1, f"{type(error).__name__}: {error}")
    return _Outcome(shown, done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("command", "is_whole"),
    [nightly_unless(not whole, command, whole) for command in COMMANDS for whole in (False, True)],
)
def test_odd_values_are_refused_with_a_hint(
    command: str,
    is_whole: bool,
    odd: Mapping[str, str],
    no_work: None,
    bundle: Path,
    checkpoint: Path,
    texts: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "a"}\n')
    outcomes = []
    for number, action in enumerate(_arguments(command)):
        if (command, action.dest) in _LEFT_OUT:
            continue
        values = _odd_values(action, odd)
        step = 1 if is_whole else max(1, len(values) // _EVERY_RUN)
        for value in values[number % step :: step]:
            output = tmp_path / str(len(outcomes))
            line = _command_line(command, bundle, checkpoint, texts, output)
            outcomes.append(_outcome([command, *_words(line, action, value)], tmp_path))
    faults = [(outcome.fault, outcome.words, outcome.message) for outcome in outcomes if outcome.fault is not None]
    assert not faults, "\n".join(map(str, faults))
    assert all(outcome.code != 0 or command in ("extend", "package", "run", "inspect") for outcome in outcomes)


@pytest.mark.parametrize(
    "message",
    ["", "error: It failed.\n", "error: [Errno 2] No such file\nCheck it.\n", "error: a\nTo see it, add --debug.\n"],
)
def test_a_message_without_a_hint_is_found(message: str) -> None:
    assert _Outcome((), 1, message).fault is not None
    assert _Outcome((), 1, "error: It failed.\nUse --force.\n").fault is None
    assert _Outcome((), 139, "").fault == "exit code 139"


@pytest.mark.parametrize(
    "words",
    [
        ["build", "CHECKPOINT", "--fp16", "--bf16"],
        ["build", "CHECKPOINT", "--calibrate", "TEXTS"],
        ["build", "CHECKPOINT", "--profiles", "8", "--target", "onnx"],
        ["build", "CHECKPOINT", "--unverified", "--positions", "none", "--max-len", "100"],
        ["verify", "BUNDLE", "--json", "--quiet"],
        ["run", "BUNDLE", "TEXTS", "-o", "x.jsonl", "--prompt", "a", "--prompt-name", "query"],
        ["run", "BUNDLE", "TEXTS", "-o", "x.jsonl", "--stride", "4", "--overflow", "truncate"],
        ["run", "BUNDLE", "TEXTS", "-o", "x.jsonl", "--late-chunking", "sentences", "--overflow", "split"],
        ["run", "BUNDLE", "TEXTS", "-o", "x.jsonl", "--ray", "--device", "GPU"],
        ["rebuild", "BUNDLE", "--target", "onnx"],
    ],
    ids=" ".join,
)
def test_options_that_contradict_each_other_are_refused_with_a_hint(
    words: list[str], no_work: None, bundle: Path, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    named = {"BUNDLE": bundle, "CHECKPOINT": checkpoint, "TEXTS": texts}
    outcome = _outcome([named.get(word, word) for word in words], tmp_path)
    assert outcome.code == 1, outcome
    assert outcome.fault is None, outcome


@pytest.mark.parametrize("entry", _ODD_ENTRIES)
@pytest.mark.parametrize("option", ["quality", "tune", "build", "rebuild"])
def test_what_a_command_cannot_read_of_a_folder_is_named_before_the_work(
    option: str, entry: str, no_work: None, bundle: Path, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for text in texts.iterdir():
        (folder / text.name).symlink_to(text)
    _ODD_ENTRIES[entry](folder / "9b.txt")
    output = tmp_path / "out"
    words: list[object] = {
        "quality": ["quality", bundle, "--texts", folder, "--limit", 3],
        "tune": ["tune", checkpoint, "--texts", folder, "--max-len", 100, "-o", output],
        "build": ["build", checkpoint, "--max-len", 100, "--int8", "--calibrate", folder, "-o", output],
        "rebuild": ["rebuild", bundle, "--int8", "--calibrate", folder, "-o", output],
    }[option]
    outcome = _outcome(words, tmp_path)
    assert outcome.code == 1, "a part of the folder was read"
    assert f"error: {folder / '9b.txt'} " in outcome.message
    assert outcome.fault is None, outcome
    assert not output.exists()


@pytest.mark.parametrize("bad", ['{"id": null, "text": 5}', "no JSON"])
def test_a_row_without_an_id_is_named_by_its_number(
    hdexport: Callable[..., Any], bundle: Path, tmp_path: Path, bad: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"id": "a", "text": "a"}}\n{bad}\n')
    said = hdexport("run", bundle, rows, "-o", tmp_path / "out.jsonl").stderr
    assert "The first of them is row number 1, which has no id: " in said


def test_a_name_as_long_as_names_can_be_is_written(
    hdexport: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / ("n" * 255)
    done = hdexport("extend", checkpoint, "--max-len", 100, "-o", output)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [output]


def test_a_key_comes_from_a_pipe_that_a_program_writes_to(no_work: None, bundle: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as pipe:
        print("secret", file=pipe, flush=True)
        pipe.close()
        words = ["serve", bundle, "--port", 0, "--api-key-file", f"/dev/fd/{read}"]
        assert _outcome(words, tmp_path).code is None


def test_a_bundle_that_no_library_can_open_is_refused_by_its_name(
    hdexport: Callable[..., Any], bundle: Path, tmp_path: Path
) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.symlink_to(bundle)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    assert hdexport("run", odd, rows, "-o", tmp_path / "out.jsonl").returncode == 0, "a link to it has another name"
    shutil.copytree(bundle, tmp_path / "copies" / odd.name)
    done = hdexport("run", tmp_path / "copies" / odd.name, rows, "-o", tmp_path / "other.jsonl")
    assert done.returncode == 1
    assert "is not UTF-8" in done.stderr
