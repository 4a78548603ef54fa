"""Bundles of one graph with several settings of sentence-transformers."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.reader import open_bundle


def with_settings_of(checkpoint: Path, bundle: Path, copy: Path) -> Path:
    """Copy a bundle, with the settings of a checkpoint that has the same model: as if it had been built of it."""
    shutil.copytree(bundle, copy)
    manifest = open_bundle(copy).manifest
    settings = sentence_settings(find_checkpoint(checkpoint), manifest.task)
    seal(copy, dataclasses.replace(manifest, sentence=settings))
    return copy
