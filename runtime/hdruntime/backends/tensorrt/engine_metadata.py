"""The metadata of an engine: its plugins, its source and the machine that built it."""

from __future__ import annotations

from dataclasses import dataclass

from hdruntime.backends.entry import ThisMachine, version_numbers
from hdruntime.bundle.checked_json import from_json
from hdruntime.bundle.manifest import EngineFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError


@dataclass(frozen=True, kw_only=True)
class BuiltOn:
    """The machine that built an engine; ``driver`` and ``gpu`` are None on a machine without them."""

    platform: str
    driver: str | None
    gpu: str | None
    date: str


@dataclass(frozen=True, kw_only=True)
class EngineMetadata:
    """What the JSON file beside an engine adds to the engine's record in the manifest.

    Attributes:
        plugins: operators that the runtime must provide -> layers of each.
        engine_sha256: SHA-256 of the engine's file.
        onnx_sha256: SHA-256 of each file of the graph that the engine was built from, by name.
    """

    plugins: dict[str, int]
    engine_sha256: str
    onnx_sha256: dict[str, str]
    built_on: BuiltOn


def older_driver(metadata: EngineMetadata, machine: ThisMachine) -> str | None:
    """A note if the driver is older than the driver that the engine was built with, which may or may not matter."""
    built_with = metadata.built_on.driver
    if built_with is None or machine.driver is None or version_numbers(machine.driver) >= version_numbers(built_with):
        return None
    return f"the driver ({machine.driver}) is older than the driver that the engine was built with ({built_with})"


def read_engine_metadata(bundle: Bundle, engine: EngineFile) -> EngineMetadata:
    """Read the JSON file beside an engine; a malformed file is a BundleCorruptError."""
    path = bundle.file(engine.metadata)
    try:
        return from_json(path.read_bytes(), EngineMetadata, name="engine metadata")
    except (OSError, ValueError) as error:
        raise BundleCorruptError(
            f"The engine metadata {path} cannot be read: {error}.", hint="Rebuild the bundle."
        ) from None
