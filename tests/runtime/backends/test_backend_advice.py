"""What is said of a GPU that is not used: following the advice leads to what runs on it, and never in a circle."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import shlex
from pathlib import Path

import pytest

from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdruntime.backends import choice
from hdruntime.backends.choice import open_runner
from hdruntime.backends.entry import ThisMachine
from hdruntime.backends.registry import backend_named
from hdruntime.backends.tensorrt.backend import RTX_ARCHITECTURES, RTX_ON_REQUEST
from hdruntime.bundle.manifest import Backend, EngineFile, ProfileShape
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendUnavailableError, write
from hdruntime.gpu.driver import Gpu, no_gpu_reason
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA
from support.comparators import named_case

NOWHERE = ThisMachine(gpu=None, driver=None, versions={})
HOPPER = ThisMachine(
    gpu=Gpu(name="NVIDIA H200", architecture="sm90", memory_bytes=141 * 2**30),
    driver="580.65.06",
    versions={Backend.TENSORRT_RTX: "11.4.0"},
)
INSTALL = {
    Backend.ONNXRUNTIME_CUDA: INSTALL_ONNXRUNTIME_CUDA,
    Backend.TENSORRT: "pip install 'hdexport[tensorrt]'",
    Backend.TENSORRT_RTX: "pip install 'hdexport[rtx]'",
    Backend.TENSORRT_LEAN: "pip install 'hdexport[lean]'",
}


ENGINE = EngineFile(
    file="engines/it.engine",
    metadata="engines/it.json",
    variant="tensorrt",
    version="11.4.0",
    precision="float16",
    architectures=("sm86",),
    profiles=(ProfileShape(batch=(1, 1, 8), tokens=(1, 16, 16)),),
)
BUNDLED = {
    "no engine": (),
    "tensorrt": (ENGINE,),
    "version-compatible": (dataclasses.replace(ENGINE, version_compatible=True),),
    "of a newer version": (dataclasses.replace(ENGINE, version="12.0.0", version_compatible=True),),
    "tensorrt_rtx": (dataclasses.replace(ENGINE, variant="tensorrt_rtx", architectures=("sm80", "sm86", "sm89")),),
}
GPUS = ["sm61", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]


@pytest.mark.parametrize(("hidden", "level"), [(None, logging.WARNING), ("", logging.INFO)])
def test_a_gpu_that_only_the_driver_sees_is_named(
    bundle_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, hidden: str | None, level: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    machine = dataclasses.replace(NOWHERE, listed_gpus=("NVIDIA H200",))
    with caplog.at_level(logging.INFO, logger="hdruntime"):
        _, runner, reason = open_runner(open_bundle(bundle_path), "auto", threads=None, machine=machine)
    assert runner.backend is Backend.ONNXRUNTIME
    no_gpu = no_gpu_reason(("NVIDIA H200",))
    assert reason == f"{no_gpu} The bundle has no graph for OpenVINO."
    assert no_gpu.startswith("CUDA does not find the GPU that the NVIDIA driver lists, NVIDIA H200")
    assert no_gpu.endswith(" (CUDA_VISIBLE_DEVICES='').") == (hidden is not None)
    assert [record.levelno for record in caplog.records if reason in record.message][-1] == level


def follow(advice: str, bundle: Bundle, machine: ThisMachine) -> tuple[Bundle, ThisMachine]:
    """What the commands of an advice leave behind, if they do what the real ones do."""
    assert machine.gpu is not None
    for command in advice.split(" && "):
        if command.startswith("hdexport rebuild"):
            words = shlex.split(command)
            variant = Backend(words[words.index("--target") + 1].replace("-", "_"))
            version = machine.versions.get(variant)
            assert version is not None, f"{command}: {variant.value} is not installed"
            assert builds_for(variant, machine.gpu.architecture), command
            of_rtx = [name for name in RTX_ARCHITECTURES if name not in RTX_ON_REQUEST]
            given = [f"sm{words[words.index('--sm') + 1]}"] if "--sm" in words else of_rtx
            engine = dataclasses.replace(
                ENGINE,
                variant=variant.value,
                version=version,
                architectures=tuple(given) if variant is Backend.TENSORRT_RTX else (machine.gpu.architecture,),
                version_compatible="--version-compatible" in words,
            )
            bundle = with_engines(bundle, engine)
        else:
            extra = re.search(r"hdexport\[(\w+)\]", command)
            if extra is None:
                assert command in INSTALL_ONNXRUNTIME_CUDA
                continue
            backend = next(backend for backend, line in INSTALL.items() if f"[{extra[1]}]" in line)
            machine = dataclasses.replace(machine, versions={**machine.versions, backend: "11.5.0"})
    return bundle, machine


def builds_for(backend: Backend, architecture: str) -> bool:
    entry = backend_named(backend)
    assert entry is not None
    return entry.builds_for(architecture)


def with_engines(bundle: Bundle, *engines: EngineFile) -> Bundle:
    return Bundle(bundle.path, dataclasses.replace(bundle.manifest, engines=engines))


@pytest.mark.parametrize("engines", BUNDLED.values(), ids=BUNDLED)
def test_following_the_advice_leads_to_a_backend_that_runs(bundle_path: Path, engines: tuple[EngineFile, ...]) -> None:
    for architecture in GPUS:
        with named_case(architecture):
            gpu = Gpu(name="a GPU", architecture=architecture, memory_bytes=2**34)
            original = with_engines(open_bundle(bundle_path), *engines)
            for chosen in itertools.chain.from_iterable(itertools.combinations(INSTALL, count) for count in range(5)):
                for version, asked in itertools.product(("11.3.0", "11.4.0", "11.5.0"), INSTALL):
                    bundle = original
                    machine = ThisMachine(gpu=gpu, driver="580.65.06", versions=dict.fromkeys(chosen, version))
                    seen = []
                    backend = asked
                    while (reason := choice.unavailable_reason(bundle, backend, machine=machine)) is not None:
                        assert reason not in seen, seen
                        seen.append(reason)
                        hint = write(reason.hint)
                        ways = dict(re.findall(r"^  (\w+): (.+)$", hint, re.MULTILINE))
                        if ways:
                            assert not builds_for(backend, architecture)
                            name, advice = next(iter(ways.items()))
                            backend = Backend(name)
                            if advice == "runs here":
                                continue
                        else:
                            advice = re.search(r": ((?:pip|hdexport) .*)$", hint, re.MULTILINE)[1]  # type: ignore[index]
                        bundle, machine = follow(advice, bundle, machine)
                    assert len(seen) <= 4


def test_on_an_h200_the_advice_names_what_runs_there(bundle_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = with_engines(open_bundle(bundle_path), *BUNDLED["tensorrt_rtx"])
    open_runner(bundle, "auto", threads=None, machine=HOPPER)
    ways = (
        "To use the GPU:\n"
        f"  tensorrt: pip install 'hdexport[tensorrt]' && hdexport rebuild {bundle_path} --target tensorrt\n"
        f"  onnxruntime_cuda: {INSTALL_ONNXRUNTIME_CUDA}"
    )
    assert caplog.messages[-1].endswith(ways)
    with pytest.raises(BackendUnavailableError) as refused:
        open_runner(bundle, "tensorrt_rtx", threads=None, machine=HOPPER)
    assert str(refused.value).endswith(f"tensorrt_rtx supports no GPU of sm90.\n{ways}")


def test_the_gpus_of_tensorrt_rtx_are_those_of_the_package() -> None:
    pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")
    default = tuple(name for name in RTX_ARCHITECTURES if name not in RTX_ON_REQUEST)
    assert EngineTarget(Backend.TENSORRT_RTX).architectures == default
    assert EngineTarget(Backend.TENSORRT_RTX, RTX_ARCHITECTURES).architectures == RTX_ARCHITECTURES
