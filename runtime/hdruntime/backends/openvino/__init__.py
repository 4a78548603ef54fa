"""OpenVINO, on CPUs and on Intel's GPUs and NPUs."""

from __future__ import annotations

__all__ = ["OpenVinoRunner"]

from hdruntime.backends.openvino.runner import OpenVinoRunner
