"""Writes a checkpoint with more positions as a Hugging Face directory, to be fine-tuned and then built.

The files are edited and the model is not loaded, so every weight but the position table keeps every bit, with any heads
and of any type.
"""

from __future__ import annotations

__all__ = ["ExtendOptions", "extend"]

import logging
from dataclasses import dataclass
from pathlib import Path

from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.extended_files import CHECKPOINT_DIRECTORY, check_extendable, extension_of, write_extended
from hdexport.checkpoint.position_choice import configuration_remark, configured_alpha
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.checkpoint.unread_weights import unread_weights
from hdexport.model.positions import DEFAULT_ALPHA, check_options
from hdexport.support.progress import Progress
from hdruntime.bundle.manifest import PositionForm, Positions, Scheme
from hdruntime.bundle.staging import staged_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExtendOptions:
    """Which checkpoint is extended, and how.

    Attributes:
        model: a checkpoint's directory, or ``organisation/name`` on the Hugging Face hub, which ``@revision`` may
            follow.
        output: the directory to write.
        max_len: number of positions; fewer than the checkpoint's cut the table.
        scheme: source of the positions after the checkpoint's.
        alpha: weight of the coarse position in the hierarchical scheme; None for the weight in the checkpoint's
            configuration, else 0.4, which suits training.
        revision: branch, tag or commit on the Hub.
        force: replace a checkpoint at `output`.
        trust: which code of the checkpoint may run.
    """

    model: str | Path
    output: Path
    max_len: int
    scheme: Scheme = Scheme.HIERARCHICAL
    alpha: float | None = None
    revision: str | None = None
    force: bool = False
    trust: Trust = UNTRUSTED


def extend(options: ExtendOptions, progress: Progress | None = None) -> Positions:
    """Write a checkpoint with more positions.

    The table keeps the checkpoint's type, and its first rows every bit unless the scheme stretches them. The limits in
    the configuration, the tokenizer and the sentence-transformers files grow with it.

    Returns:
        The positions of the new checkpoint.

    Raises:
        HdexportError: one of `hdruntime.errors`; then nothing is written.
    """
    progress = progress or Progress()
    progress.step("Reading the checkpoint")
    checkpoint = find_checkpoint(options.model, revision=options.revision, trust=options.trust)
    for remark in checkpoint.remarks:
        progress.result(remark)
    check_extendable(checkpoint, options.output)
    base = checkpoint.base_positions
    alpha = _alpha(checkpoint, options, progress)
    check_options(scheme=options.scheme, alpha=alpha, max_len=options.max_len, base=base)
    positions = Positions(
        scheme=options.scheme,
        alpha=alpha if options.scheme is Scheme.HIERARCHICAL else None,
        base=base,
        rows=options.max_len,
        first_row=checkpoint.config[checkpoint.family.positions_key] - base,
        form=PositionForm.FOLDED,
    )
    files = checkpoint.weight_files()
    for line in unread_weights(checkpoint):
        logger.warning("%s The extended checkpoint does not hold them.", line)
    extension = extension_of(checkpoint, positions)
    with staged_directory(options.output, CHECKPOINT_DIRECTORY, force=options.force) as directory:
        progress.step(f"Extending positions to {options.max_len} ({options.scheme})")
        write_extended(checkpoint, files, positions, extension, directory)
    return positions


def _alpha(checkpoint: Checkpoint, options: ExtendOptions, progress: Progress) -> float:
    configured = configured_alpha(checkpoint)
    if configured is not None and options.max_len > checkpoint.base_positions:
        progress.result(configuration_remark(configured, scheme=options.scheme, alpha=options.alpha))
    if options.alpha is not None:
        return options.alpha
    return DEFAULT_ALPHA if configured is None else configured
