"""The identity of a bundle: a checksum of everything that its outputs depend on."""

from __future__ import annotations

import dataclasses
import hashlib

from hdruntime.bundle.checked_json import json_from_dataclass
from hdruntime.bundle.manifest import Manifest
from hdruntime.constants import KERNELS_FOLDER


def identity_of_bundle(manifest: Manifest) -> str:
    """A checksum of the bundle's graphs, weights and tokenizer.

    Engines, kernels and `made_by` are left out: another machine may rebuild them and continue a job.
    """
    engine_files = {name for engine in manifest.engines for name in (engine.file, engine.metadata)}
    files = {
        name: record
        for name, record in manifest.files.items()
        if name not in engine_files and not name.startswith(f"{KERNELS_FOLDER}/")
    }
    rest = dataclasses.replace(manifest, files=files, engines=(), verification=None, made_by={})
    return hashlib.sha256(json_from_dataclass(rest).encode()).hexdigest()
