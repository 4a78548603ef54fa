"""Constants shared by several packages of hdexport."""

from __future__ import annotations

from typing import Final

FORMAT_VERSION = 3
"""Version of the bundle's layout and manifest; increased when an older runtime could misread a bundle."""

MANIFEST_FILE = "manifest.json"
"""Name of the manifest in a bundle; a directory with this file is a bundle."""

CONFIG_FILE = "config.json"
"""File of a bundle with the checkpoint's configuration."""

PORTABLE_LOWERING: Final = "portable"
"""``GraphFile.lowering`` of the graph that any ONNX runtime runs."""

CPU_LOWERING: Final = "onnxruntime_cpu"
"""``GraphFile.lowering`` of the graph made for ONNX Runtime on a CPU."""

CUDA_LOWERING: Final = "onnxruntime_cuda"
"""``GraphFile.lowering`` of the graph made for ONNX Runtime on an NVIDIA GPU; not every bundle has it."""

OPENVINO_LOWERING: Final = "openvino"
"""``GraphFile.lowering`` of the graph made for OpenVINO; a bundle has it if it was built for that target."""

OPENVINO_UNPADDED_LOWERING: Final = "openvino_unpadded"
"""``GraphFile.lowering`` of the graph for OpenVINO that takes no padding: its attention has no mask, and is faster.
Only bundles whose attention is so have it, beside `OPENVINO_LOWERING`."""

CUDA_PROVIDER = "CUDAExecutionProvider"
"""ONNX Runtime's execution provider for NVIDIA GPUs."""

RUNTIME_CACHE_SUFFIX = ".runtime_cache"
"""Suffix of files that the runtime leaves in a bundle; they are not part of it and may be deleted."""

KERNELS_FOLDER = "kernels"
"""Folder of a bundle with the GPU kernels that our plugins launch; all its engines share them."""
