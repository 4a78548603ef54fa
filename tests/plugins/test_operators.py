"""What holds for every operator: its specification, and that a face loads only what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hdplugins import OPERATORS

FACES = ("reference", "onnx_function", "triton_kernel", "tensorrt_plugin")


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_registered_under_its_name(name: str) -> None:
    operator = OPERATORS[name]
    assert operator.name == name
    assert operator.version >= 1
    assert operator.inputs[-len(operator.optional_inputs) :] == operator.optional_inputs or not operator.optional_inputs


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_a_reference_and_a_portable_body(name: str) -> None:
    assert OPERATORS[name].has_face("reference")
    assert OPERATORS[name].has_face("onnx_function")


@pytest.mark.parametrize("name", OPERATORS)
def test_every_face_that_is_there_loads(name: str) -> None:
    operator = OPERATORS[name]
    for face in FACES:
        if operator.has_face(face) and face != "triton_kernel":
            assert operator.face(face).__all__


def test_a_face_that_is_not_there_is_said_to_be_missing() -> None:
    operator = OPERATORS["DenseAttention"]
    assert not operator.has_face("tensorrt_plugin")
    with pytest.raises(ModuleNotFoundError):
        operator.face("tensorrt_plugin")


def test_the_operators_load_without_any_framework() -> None:
    heavy = ("torch", "onnx", "onnxscript", "triton", "tensorrt", "tensorrt_rtx", "onnxruntime")
    code = f"import sys, hdplugins; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
