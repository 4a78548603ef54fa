"""A subject as others load it: a Hugging Face folder with the positions of the bundle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.bench.measure.case import MeasuredModel
from hdruntime.bundle.reader import open_bundle

if TYPE_CHECKING:
    from hdexport.checkpoint import Checkpoint

_FOLDER = "checkpoint"


def checkpoint_folder(subject: MeasuredModel, folder: Path) -> Path:
    """The subject's checkpoint, its positions extended; where they are computed, the checkpoint itself.

    Positions by each text's length are stretched for the longest text.

    Args:
        folder: the extended checkpoint is made there once, for all peers.

    Raises:
        HdexportError: the checkpoint cannot be read or extended.
    """
    from hdexport.checkpoint import find_checkpoint
    from hdexport.checkpoint.heads import task_head
    from hdexport.extend import ExtendOptions, extend
    from hdexport.model.positions import TABLES
    from hdexport.verify.pytorch_reference import positions_of
    from hdruntime.bundle.manifest import Scheme

    assert subject.checkpoint is not None
    checkpoint = find_checkpoint(subject.checkpoint, trust=subject.trust)
    manifest = open_bundle(subject.bundle, check_files=False).manifest
    # Peers take pickles and code: this is where those are refused.
    checkpoint.weight_files()
    task_head(checkpoint, manifest.task)
    is_extended = manifest.positions.rows > manifest.positions.base
    if not checkpoint.family.learned_positions or not (
        is_extended or checkpoint.family.stores_table(checkpoint.config)
    ):
        return _lasting(checkpoint, folder / _FOLDER)
    output = folder / _FOLDER
    if output.exists():
        return output
    max_len, scheme, alpha = positions_of(manifest, checkpoint.family, checkpoint.config)
    if scheme not in TABLES:
        # No folder can say that positions depend on the length; the peer's remark does.
        scheme = Scheme.INTERPOLATE_STATIC
    options = ExtendOptions(
        model=checkpoint.path,
        output=output,
        max_len=max_len,
        scheme=scheme,
        alpha=alpha,
        trust=subject.trust,
    )
    extend(options)
    return output


def _lasting(checkpoint: Checkpoint, output: Path) -> Path:
    """The checkpoint's directory; a copy of one that was converted, which this process takes with it when it ends."""
    if checkpoint.path == checkpoint.origin:
        return checkpoint.path
    if not output.exists():
        shutil.copytree(checkpoint.path, output)
    return output
