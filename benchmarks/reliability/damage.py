"""Damaged bundles: each is refused, or its embeddings are unchanged. No crash, no error of another library's class.

Usage: python -m benchmarks.reliability.damage [--cases 250] [--seed 0] [--output FILE]

A case damages one file of a copy of the bundle: a flipped bit, a missing end, a page of zeros, another file's content,
a missing file, a directory or a named pipe in its place. A third of the cases damage the manifest, whose values are
changed with their checksum, too. Each case is a process, which opens the bundle, loads it and embeds a text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hdruntime
from benchmarks.record import show
from benchmarks.reliability.sample import sample_bundle
from hdruntime.bundle.manifest_json import with_checksum

_TEXT = "A text that is embedded by the bundle."

_UNCHANGED, _REFUSED, _CHANGED, _FOREIGN = "unchanged", "refused", "other embeddings", "foreign error"

_EXIT_CODES = {0: _UNCHANGED, 3: _REFUSED, 4: _CHANGED, 5: _FOREIGN}


def main() -> int:
    """Damage, open and count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rng, found, wrong = random.Random(options.seed), Counter(), []
    with sample_bundle() as bundle, tempfile.TemporaryDirectory() as scratch:
        expected = Path(scratch) / "expected.npy"
        assert _in_a_process(lambda: np.save(expected, _embedding(bundle))) == _UNCHANGED, "the bundle itself fails"
        for number in range(options.cases):
            copy = Path(scratch) / "copy"
            shutil.copytree(bundle, copy)
            what = _damage_manifest(copy, rng) if number % 3 == 0 else _damage_file(copy, rng)
            outcome = _in_a_process(lambda copy=copy: _compare(copy, expected))  # type: ignore[misc]
            found[outcome] += 1
            # A value of a manifest that was written with its checksum is a bundle of its own.
            if outcome not in (_UNCHANGED, _REFUSED) and not (outcome == _CHANGED and what.startswith("value")):
                wrong.append(f"{what}: {outcome}")
            shutil.rmtree(copy)
    show(options.output, module="benchmarks.reliability.damage", cases=options.cases, wrong=wrong, **found)
    return 1 if wrong else 0


def _embedding(bundle: Path) -> np.ndarray:
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        return session.embed([_TEXT])


def _compare(bundle: Path, expected: Path) -> None:
    try:
        found = _embedding(bundle)
    except hdruntime.HdexportError:
        sys.exit(3)
    except Exception:
        sys.exit(5)
    sys.exit(0 if np.array_equal(found, np.load(expected)) else 4)


def _in_a_process(call: Callable[[], object]) -> str:
    """The outcome of a call in a fork of this process, which never ran a session; a crash by its signal."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 0
        try:
            call()
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            code = 6
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return _EXIT_CODES.get(code, f"crash ({code})")


def _damage_file(bundle: Path, rng: random.Random) -> str:
    files = sorted(path for path in bundle.rglob("*") if path.is_file() and path.name != "manifest.json")
    file = rng.choice(files)
    kind = rng.choice(sorted(DAMAGES))
    DAMAGES[kind](file, rng)
    return f"{kind} of {file.name}"


def _flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _zero_page(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content)) // 4096 * 4096
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    file.write_bytes(content)


def _replace(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def damage(file: Path, rng: random.Random) -> None:
        file.unlink()
        make(file)

    return damage


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "bit": _flip,
    "end": lambda file, rng: os.truncate(file, rng.randrange(file.stat().st_size)),
    "page": _zero_page,
    "more": lambda file, rng: file.write_bytes(file.read_bytes() + b"\0"),
    "content": lambda file, rng: file.write_bytes(b"other content"),
    "missing": _replace(lambda file: None),
    "directory": _replace(lambda file: file.mkdir()),
    "pipe": _replace(os.mkfifo),
}


def _damage_manifest(bundle: Path, rng: random.Random) -> str:
    file = bundle / "manifest.json"
    kind = rng.choice(["bit", "end", "value", "key", "pipe"])
    if kind in DAMAGES:
        DAMAGES[kind](file, rng)
    else:
        values = json.loads(file.read_bytes())
        _change(values, rng, drops_keys=kind == "key")
        file.write_text(with_checksum(json.dumps(values)), encoding="utf-8")
    return f"{kind} of manifest.json"


def _change(values: Any, rng: random.Random, *, drops_keys: bool) -> None:
    """Change a value, or leave out or misspell a key, somewhere in nested objects and lists."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, each in items:
            places.append((value, key))
            walk(each)

    walk(values)
    holder, key = rng.choice([place for place in places if not drops_keys or isinstance(place[0], dict)])
    if drops_keys:
        value = holder.pop(key)
        if rng.random() < 0.5:
            holder[f"{key}_"] = value
    else:
        holder[key] = rng.choice([None, True, -1, 0, 3, 2**40, 0.5, "", "other", [], {}, [1], {"a": 1}])


if __name__ == "__main__":
    sys.exit(main())
