"""An engine's passport: what it is, what it was made from and where, as JSON beside it."""

from __future__ import annotations

__all__ = ["PASSPORT_VERSION", "BuiltOn", "Passport", "built_here", "onnx_hashes", "write_passport"]

import dataclasses
import hashlib
import json
import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from hdexport.gpu import driver_version, gpus
from hdruntime.bundle import ProfileShape
from hdruntime.optional import require

PASSPORT_VERSION = 2
"""Version of the JSON's keys."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BuiltOn:
    """The machine that built an engine; ``driver`` and ``gpu`` are None where there was none."""

    platform: str
    driver: str | None
    gpu: str | None
    date: str


@dataclass(frozen=True, kw_only=True)
class Passport:
    """What must agree for an engine to be usable, and where it comes from.

    Attributes:
        flavour: ``tensorrt`` or ``tensorrt_rtx``.
        version: of that package; an engine runs with the version that built it.
        precision: of the graph's weights.
        architectures: GPU architectures it runs on, e.g. ``sm89``.
        profiles: the shapes it takes.
        plugins: operators that the runtime must provide -> layers of each.
        engine_sha256: of the engine itself.
        onnx_sha256: SHA-256 of each file of the graph it was built from, by name.
        built_on: the machine that built it.
    """

    flavour: str
    version: str
    precision: str
    architectures: tuple[str, ...]
    profiles: tuple[ProfileShape, ...]
    plugins: dict[str, int]
    engine_sha256: str
    onnx_sha256: dict[str, str]
    built_on: BuiltOn


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

    The lowered graph itself is not kept, but its weights are the bundle's, whose hash the manifest has too.

    Args:
        path: an ONNX file that can be read.
    """
    onnx = require("onnx")
    model = onnx.load(path, load_external_data=False)
    locations = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return {name: _sha256(path.parent / name) for name in (path.name, *sorted(locations))}


def write_passport(passport: Passport, path: Path) -> None:
    """Write the JSON, whole or not at all."""
    text = json.dumps({"passport_version": PASSPORT_VERSION, **dataclasses.asdict(passport)}, indent=2)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
