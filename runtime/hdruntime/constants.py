"""Constants shared by several packages of hdexport."""

from __future__ import annotations

from typing import Final

WEIGHTS_FILE = "model.onnx.data"
"""The file in a bundle with the weights of all graphs but int8 ones."""

FORMAT_VERSION = 6
"""Version of the bundle's layout and manifest; increased when an older runtime could misread a bundle."""

MANIFEST_FILE = "manifest.json"
"""Name of the manifest in a bundle; a directory with this file is a bundle."""

CONFIG_FILE = "config.json"
"""File of a bundle with the checkpoint's configuration."""

PORTABLE_LOWERING: Final = "portable"
"""``GraphFile.lowering`` of the graph that any ONNX runtime runs."""

RUNTIME_CACHE_SUFFIX = ".runtime_cache"
"""Suffix of files that the runtime leaves in a bundle; they are not part of it and may be deleted."""

KERNELS_FOLDER = "kernels"
"""Folder of a bundle with the GPU kernels that our plugins launch; all its engines share them."""
