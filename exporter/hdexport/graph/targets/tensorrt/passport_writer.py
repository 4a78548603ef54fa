"""Writes an engine's passport beside it; `hdruntime.backends.tensorrt.passport` describes its contents."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from hdruntime.backends.tensorrt.passport import BuiltOn, Passport
from hdruntime.bundle.manifest import EngineFile
from hdruntime.bundle.reader import sha256_of_file
from hdruntime.gpu.driver import driver_version, gpus
from hdruntime.optional import require
from hdruntime.whole_files import write_whole

_VERSION = 2
"""Version of the JSON's keys."""


def built_here() -> BuiltOn:
    """This machine, now."""
    found = gpus()
    return BuiltOn(
        platform=platform.platform(),
        driver=driver_version(),
        gpu=found[0].name if found else None,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def onnx_hashes(path: Path) -> dict[str, str]:
    """SHA-256 of a graph's file and of each file that holds its weights, by name.

    The lowered graph is not kept; its weights are the bundle's, whose hash is also in the manifest.
    """
    onnx = require("onnx")
    model = onnx.load(path, load_external_data=False)
    locations = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return {name: sha256_of_file(path.parent / name) for name in (path.name, *sorted(locations))}


def write_passport(passport: Passport, engine: EngineFile, path: Path) -> None:
    """Write the JSON, whole or not at all: the passport, and the manifest's facts but for the names of files."""
    facts = {key: value for key, value in asdict(engine).items() if key not in ("file", "passport")}
    write_whole(path, json.dumps({"passport_version": _VERSION, **asdict(passport), **facts}, indent=2) + "\n")
