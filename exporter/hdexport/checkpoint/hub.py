"""Checkpoints on the Hugging Face hub: downloaded once, and pinned to a commit."""

from __future__ import annotations

import re
from pathlib import Path

from hdexport.checkpoint import bge_m3
from hdexport.checkpoint.sentence_modules import encoder_folder, sentence_modules
from hdexport.checkpoint.trust import Trust
from hdexport.checkpoint.weight_files import weight_files
from hdexport.support.json_files import shown
from hdruntime.errors import ModelError
from hdruntime.hub import HubName
from hdruntime.optional import require

_COMMIT = re.compile(r"[0-9a-f]{40}")

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*/config.json", "artifact.metadata"]
# Of one layer each: the heads of hybrid-similarity, which other builds name.
_FILES += [f"{name}.pt" for name in (bge_m3.SPARSE, bge_m3.COLBERT)]


def download(model: HubName, trust: Trust) -> Path:
    """The model's files, in a directory that is named after the commit. Files of a commit that are in the cache are not
    requested again. Trusted pickles add ``*.bin`` of folders without safetensors, and trusted code ``*.py``."""
    cached = cached_snapshot(model)
    if cached is not None and not _without_weights(cached, allow_pickle=trust.allow_pickle):
        return cached
    files = [*_FILES, "*.py"] if trust.trust_remote_code else _FILES
    path = _snapshot(model, files)
    folders = _without_weights(path, allow_pickle=True) if trust.allow_pickle else []
    if folders:
        pickles = [f"{folder.relative_to(path).as_posix()}/*.bin".removeprefix("./") for folder in folders]
        path = _snapshot(HubName(name=model.name, revision=path.name), files + pickles)
    return path


def cached_snapshot(model: HubName) -> Path | None:
    """The cached files of a commit; None where they are missing, or the revision is not a commit."""
    if model.revision is None or not _COMMIT.fullmatch(model.revision):
        return None
    return local_snapshot(model)


def local_snapshot(model: HubName) -> Path | None:
    """The cached files of a model, as of its last download; None where they are missing."""
    hub = require("huggingface_hub")
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hub.snapshot_download(model.name, revision=model.revision, local_files_only=True))
    except (HFValidationError, OSError):
        # The client raises OSError for a model that is not in the cache.
        return None


def _without_weights(path: Path, *, allow_pickle: bool) -> list[Path]:
    """The folders of a snapshot whose weights are missing: the encoder's, and dense layers'."""
    encoder = encoder_folder(path) or path
    layers = [path / module.folder for module in sentence_modules(path) if module.kind == "Dense"]
    return [folder for folder in (encoder, *layers) if not _has_weights(folder, allow_pickle=allow_pickle)]


def _has_weights(folder: Path, *, allow_pickle: bool) -> bool:
    try:
        weight_files(folder, allow_pickle=allow_pickle)
    except ModelError:
        return False
    return (folder / "config.json").is_file()


def _snapshot(model: HubName, patterns: list[str]) -> Path:
    hub = require("huggingface_hub")
    try:
        return Path(hub.snapshot_download(model.name, revision=model.revision, allow_patterns=patterns))
    except Exception as error:
        # The hub's client raises its own, requests' and the operating system's errors alike.
        raise ModelError(
            f"There is no directory {str(model)!r}, and the model could not be downloaded from the Hugging Face Hub: "
            f"{shown(error)}",
            hint="Check the name and the revision, or download the model and name its directory.",
        ) from error
