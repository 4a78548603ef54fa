"""Bundles by name on the Hugging Face Hub: downloaded once, and only the files that a backend reads."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hdruntime.backends.registry import backend_named
from hdruntime.bundle.manifest import Backend, Manifest
from hdruntime.bundle.reader import Bundle, open_bundle, read_manifest
from hdruntime.constants import KERNELS_FOLDER, MANIFEST_FILE
from hdruntime.errors import BundleNotFoundError
from hdruntime.gpu.driver import gpus
from hdruntime.optional import require

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.][\w./-]*))?", re.ASCII)

_AUTO = "auto"
_INT8 = "int8"

_OF_LIBRARIES = (".safetensors", ".bin")
"""Suffixes of weights that only sentence-transformers reads."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A name on the hub, ``organisation/name``, and a branch, a tag or a commit; None for the main branch."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    """``organisation/name`` or ``organisation/name@revision``; None where the text is neither."""
    match = _NAME.fullmatch(text)
    return None if match is None else HubName(name=match["name"], revision=match["revision"])


def opened_bundle(bundle: Path | str | Bundle, backend: Backend | str = _AUTO, precision: str = _AUTO) -> Bundle:
    """The bundle of a directory, or of a name on the Hugging Face Hub; a bundle that is open already stays as it is.

    A name stands for the hub where no file or directory has that name. Files are kept in the cache of
    ``huggingface_hub``, whose settings count: ``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN``, ``HF_ENDPOINT``.

    Args:
        bundle: its directory; ``organisation/name``, which ``@`` and a branch, a tag or a commit may follow; or the
            result of `open_bundle`.
        backend: backend that will run the bundle, see `hdruntime.load`: its files are downloaded. ``auto`` downloads
            engines only where there is an NVIDIA GPU.
        precision: graphs in int8 are downloaded for ``int8`` alone.
    """
    if isinstance(bundle, Bundle):
        return bundle
    path, named = Path(bundle), hub_name(str(bundle))
    if named is None or path.exists() or path.is_symlink():
        return open_bundle(path)
    snapshot = _downloaded(named, [MANIFEST_FILE])
    if not (snapshot / MANIFEST_FILE).is_file():
        raise BundleNotFoundError(
            f"{named} on the Hugging Face Hub has no {MANIFEST_FILE}: it is no bundle.",
            hint=f"If it is a checkpoint, build a bundle of it: hdexport build {shlex.quote(str(named))} -o BUNDLE",
        )
    manifest = read_manifest(snapshot)
    needed = needed_files(manifest, str(backend), str(precision))
    # By the commit: a branch may have moved since.
    commit = HubName(name=named.name, revision=snapshot.name)
    snapshot = _downloaded(commit, [MANIFEST_FILE, *sorted(needed)])
    return open_bundle(snapshot, absent=frozenset(manifest.files) - needed)


def needed_files(manifest: Manifest, backend: str, precision: str) -> set[str]:
    entry = backend_named(backend)
    variant = None if entry is None else entry.variant
    has_engine = {engine.file: engine.variant for engine in manifest.engines}
    on_gpu = bool(gpus()) if entry is None else entry.needs_gpu
    variants = set(has_engine.values()) if entry is None and on_gpu else {variant}

    def is_needed(name: str) -> bool:
        if name in has_engine:
            return has_engine[name] in variants
        if name.startswith(f"{KERNELS_FOLDER}/"):
            return on_gpu
        if name.endswith((".onnx", ".onnx.data")):
            return variant is None and (_INT8 not in name or precision == _INT8)
        return not name.endswith(_OF_LIBRARIES)

    return set(filter(is_needed, manifest.files))


def _downloaded(name: HubName, patterns: list[str]) -> Path:
    """The snapshot of a commit in the cache, with the files that a pattern matches where the hub can be reached."""
    hub = require("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name.name, revision=name.revision, allow_patterns=patterns))
    except Exception as error:
        # The client raises its own, httpx' and the operating system's errors alike.
        message = " ".join(str(error).split())
        raise BundleNotFoundError(
            f"The bundle {name}, which is no directory here, could not be downloaded from the Hugging Face Hub: "
            f"{message:.300}",
            hint="Check the name, the revision and the connection (HF_HUB_OFFLINE=0), or name a directory.",
        ) from error
