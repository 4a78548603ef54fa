"""The simulated driver and TensorRT have only calls of the real ones."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from fakes import simulated_device, simulated_tensorrt
from fakes.machine import MachineMaker
from hdplugins.tensorrt.link import provide_library_link
from hdruntime import backends
from hdruntime.backends.tensorrt.engine import KernelSpecialization, load_engine
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, BackendUnavailableError
from hdruntime.gpu.cuda import Device
from hdruntime.gpu.driver import gpus
from support.comparators import named_case

provide_library_link()
trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")
driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed: pip install cuda-bindings")

SOURCES = sorted(
    [
        *(Path(backends.__file__).parent / "tensorrt").glob("*.py"),
        *(Path(backends.__file__).parents[1] / "gpu").glob("*.py"),
    ]
)


def calls_of_the_driver() -> list[tuple[str, int]]:
    """Every call in our sources: its name, and how many arguments it passes."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [
                constant.value
                for constant in ast.walk(node.args[0])
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
            ]
            if name == "call":
                found += [(text, len(node.args) - 1) for text in names if text.startswith("cu")]
    return found


def test_the_driver_has_every_call_with_as_many_arguments() -> None:
    calls = calls_of_the_driver()
    assert len({name for name, _ in calls}) >= 30
    for name, count in calls:
        assert len(inspect.signature(getattr(driver, name)).parameters) == count, name


def test_the_simulated_calls_have_the_drivers_parameters() -> None:
    simulated = simulated_device.SimulatedDevice
    for name, function in inspect.getmembers(simulated, inspect.isfunction):
        if name.startswith("cu"):
            taken = len(inspect.signature(function).parameters) - 1
            assert taken == len(inspect.signature(getattr(driver, name)).parameters), name
    for kind in (simulated.CUstreamCaptureMode, simulated.CUpointer_attribute):
        for member in kind:
            assert int(getattr(getattr(driver, kind.__name__), member.name)) == member.value
    for code in simulated_device.Code:
        prefix = "CUDA_ERROR_" if code else "CUDA_"
        assert int(getattr(driver.CUresult, prefix + code.name)) == code.value


REAL_NAMES = {
    "PlainRuntimeConfig": "IRuntimeConfig",
    "PluginRegistry": "IPluginRegistry",
    "RtxExecutionContext": "IExecutionContext",
}
CLASSES = (
    *("Runtime", "ICudaEngine", "IExecutionContext", "RtxExecutionContext"),
    *("PlainRuntimeConfig", "IRuntimeConfig", "IRuntimeCache", "PluginRegistry"),
)


def documented_arguments(function: Any) -> list[list[str]]:
    """Names of the arguments of every overload, as pybind11 documents them."""
    heads = re.findall(r"^(?:\d+\. )?\w+\((.*)\) -> ", function.__doc__ or "", re.MULTILINE)
    return [
        [part.split(":")[0].strip() for part in re.split(r",\s*(?=\w+:)", head) if not part.startswith(("self", "*"))]
        for head in heads
    ]


def test_tensorrt_rtx_has_every_method_with_the_same_arguments() -> None:
    for name in CLASSES:
        with named_case(name):
            simulated, real = getattr(simulated_tensorrt, name), getattr(trt, REAL_NAMES.get(name, name))
            members = {
                key: value for kind in simulated.__mro__[:-1] for key, value in vars(kind).items() if key[0] != "_"
            }
            assert members
            for key, member in members.items():
                found = getattr(real, key)
                if inspect.isfunction(member):
                    taken = list(inspect.signature(member).parameters)[1:]
                    assert taken in documented_arguments(found), (key, taken, documented_arguments(found))
                else:
                    assert isinstance(found, property), key


def test_every_specialization_is_one_of_tensorrt_rtx() -> None:
    names = set(trt.DynamicShapesKernelSpecializationStrategy.__members__)
    assert {member.name for member in KernelSpecialization} == names


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU here, and this is about machines without one")
def test_without_a_gpu_tensorrt_rtx_itself_gives_the_reason(new_machine: MachineMaker) -> None:
    machine = new_machine(module="unused")
    file = machine.bundle.manifest.engines[0]
    bundle = Bundle(machine.bundle.path, machine.bundle.manifest)
    options = {"specialization": KernelSpecialization.LAZY, "cached": None}
    with pytest.raises(BackendError, match=rf"tensorrt_rtx {trt.__version__} cannot load .*: .*(CUDA|Error Code)"):
        load_engine(bundle, file, Backend.TENSORRT_RTX, **options)


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU here, and this is about machines without one")
def test_without_a_driver_the_error_of_cuda_python_is_translated() -> None:
    with pytest.raises(BackendUnavailableError, match=r"CUDA does not offer GPU 0 here: .*(.|\n)*nvidia-smi"):
        Device(driver, 0)
