"""Needs of tests that not every machine meets."""

from __future__ import annotations

import importlib.util

import pytest

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None or importlib.util.find_spec("polygraphy") is None,
    reason="TensorRT-RTX (which builds engines without a GPU) or Polygraphy is not installed",
)

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")


def _computes_bfloat16() -> bool:
    if importlib.util.find_spec("openvino") is None:
        return False
    from hdruntime.backends.openvino.devices import chosen_device, new_core

    return chosen_device(new_core(), None).has_bfloat16


openvino_computes_bfloat16 = pytest.mark.skipif(
    not _computes_bfloat16(), reason="OpenVINO does not compute in bfloat16 on this CPU"
)
