"""Whether an engine runs on a machine: every difference is found, and named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hdexport.support.bundle_writer import seal
from hdplugins.tensorrt.link import provide_library_link
from hdruntime.backends.entry import ThisMachine
from hdruntime.backends.registry import this_machine
from hdruntime.backends.tensorrt.backend import BACKENDS
from hdruntime.backends.tensorrt.engine_metadata import older_driver, read_engine_metadata
from hdruntime.bundle.manifest import Backend, EngineFile, ProfileShape
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BundleCorruptError
from hdruntime.gpu.driver import Gpu, no_gpu_reason
from support.comparators import named_case

ENGINE = EngineFile(
    file="engines/tensorrt_rtx.engine",
    metadata="engines/tensorrt_rtx.json",
    variant="tensorrt_rtx",
    version="1.7.1.116",
    precision="float16",
    architectures=("sm86", "sm89"),
    profiles=(ProfileShape(batch=(1, 1, 8), tokens=(1, 128, 128)),),
)
ADA = Gpu(name="NVIDIA L4", architecture="sm89", memory_bytes=24 * 2**30)
MACHINE = ThisMachine(gpu=ADA, driver="580.65.06", versions={Backend.TENSORRT_RTX: "1.7.1.116"})
METADATA = {
    "metadata_version": 2,
    "plugins": {"SlidingWindowAttention": 6},
    "engine_sha256": "00",
    "onnx_sha256": {"tensorrt.onnx": "11"},
    "built_on": {"platform": "Linux", "driver": "575.51.03", "gpu": None, "date": "2026-11-21"},
}


def differences(engine: EngineFile, backend: Backend, machine: ThisMachine) -> tuple[str, ...]:
    return next(entry for entry in BACKENDS if entry.name is backend).differences(engine, machine)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"driver": None}, "There is no NVIDIA driver."),
        ({"gpu": None}, no_gpu_reason(())),
        (
            {"gpu": dataclasses.replace(ADA, name="NVIDIA H100", architecture="sm90")},
            "The engine was built for GPUs of sm86, sm89; this GPU (NVIDIA H100) is sm90.",
        ),
        ({"versions": {}}, "TensorRT-RTX (tensorrt_rtx) is not installed."),
        (
            {"versions": {Backend.TENSORRT_RTX: "1.8.0.1"}},
            "The engine was built by TensorRT-RTX 1.7.1.116; the installed version is 1.8.0.1.",
        ),
    ],
)
def test_each_difference_is_named(change: dict[str, object], reason: str) -> None:
    assert differences(ENGINE, Backend.TENSORRT_RTX, MACHINE) == ()
    machine = dataclasses.replace(MACHINE, **change)  # type: ignore[arg-type]
    assert differences(ENGINE, Backend.TENSORRT_RTX, machine) == (reason,)


VERSIONS = [
    (False, Backend.TENSORRT, "11.4.0.106", True),
    (False, Backend.TENSORRT, "11.10.0.1", False),
    (True, Backend.TENSORRT, "11.10.0.1", True),
    (True, Backend.TENSORRT, "11.3.9.9", False),
    (False, Backend.TENSORRT_LEAN, "11.4.0.106", False),
    (True, Backend.TENSORRT_LEAN, "11.4.0.106", True),
    (True, Backend.TENSORRT_LEAN, "11.3.0.1", False),
]


def test_a_version_compatible_engine_runs_on_later_versions_and_the_lean_runtime() -> None:
    for version_compatible, backend, here, runs in VERSIONS:
        with named_case(version_compatible, backend, here, runs):
            engine = dataclasses.replace(
                ENGINE, variant="tensorrt", version="11.4.0.106", version_compatible=version_compatible
            )
            machine = dataclasses.replace(MACHINE, versions={backend: here})
            assert (differences(engine, backend, machine) == ()) is runs


def test_engine_metadata_is_read_and_an_older_driver_noted(sealed: Callable[..., Bundle]) -> None:
    metadata = read_engine_metadata(sealed(), ENGINE)
    assert metadata.plugins == {"SlidingWindowAttention": 6}
    for driver in ("575.51.03", "580.65.06", None):
        assert older_driver(metadata, dataclasses.replace(MACHINE, driver=driver)) is None
    for driver in ("575.9", "99.1"):
        assert "575.51.03" in str(older_driver(metadata, dataclasses.replace(MACHINE, driver=driver)))


@pytest.mark.parametrize("text", ["", json.dumps(METADATA | {"built_on": {}}), "[" * 10_000])
def test_malformed_engine_metadata_is_refused(sealed: Callable[..., Bundle], text: str) -> None:
    with pytest.raises(BundleCorruptError, match=r"tensorrt_rtx\.json cannot be read: .*\nRebuild the bundle"):
        read_engine_metadata(sealed(text), ENGINE)


def test_versions_are_those_of_the_installed_packages() -> None:
    # Other tests of this process want the parser to find it.
    provide_library_link()
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")
    assert this_machine().versions[Backend.TENSORRT_RTX] == trt.__version__


@pytest.fixture
def sealed(bundle_path: Path) -> Callable[..., Bundle]:
    """Make a bundle with a file in place of the engine, and its metadata with this text."""

    def make(text: str = json.dumps(METADATA)) -> Bundle:
        (bundle_path / "engines").mkdir()
        (bundle_path / ENGINE.file).write_text("no engine")
        (bundle_path / ENGINE.metadata).write_text(text)
        seal(bundle_path, dataclasses.replace(open_bundle(bundle_path).manifest, engines=(ENGINE,)))
        return open_bundle(bundle_path)

    return make
