"""An engine's passport: its kind, source and place of build."""

from __future__ import annotations

from dataclasses import dataclass

from hdruntime.backends.entry import ThisMachine, version_numbers
from hdruntime.bundle.checked_json import from_json
from hdruntime.bundle.manifest import EngineFile
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError


@dataclass(frozen=True, kw_only=True)
class BuiltOn:
    """The machine that built an engine; ``driver`` and ``gpu`` are None if missing."""

    platform: str
    driver: str | None
    gpu: str | None
    date: str


@dataclass(frozen=True, kw_only=True)
class Passport:
    """The facts of an engine that its passport says and the manifest does not.

    Attributes:
        plugins: operators that the runtime must provide -> layers of each.
        onnx_sha256: SHA-256 of each file of the graph it was built from, by name.
    """

    plugins: dict[str, int]
    engine_sha256: str
    onnx_sha256: dict[str, str]
    built_on: BuiltOn


def older_driver(passport: Passport, machine: ThisMachine) -> str | None:
    """A remark if the driver is older than the one that the engine was built with, which may or may not matter."""
    built_with = passport.built_on.driver
    if built_with is None or machine.driver is None or version_numbers(machine.driver) >= version_numbers(built_with):
        return None
    return f"the driver here ({machine.driver}) is older than the one that it was built with ({built_with})"


def read_passport(bundle: Bundle, engine: EngineFile) -> Passport:
    """The facts that the passport beside an engine adds to the manifest; one that is malformed is refused."""
    path = bundle.file(engine.passport)
    try:
        return from_json(path.read_bytes(), Passport, name="passport")
    except (OSError, ValueError) as error:
        raise BundleCorruptError(f"The passport {path} cannot be read: {error}.", hint="Rebuild the bundle.") from None
