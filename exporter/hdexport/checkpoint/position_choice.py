"""The positions, and the factor of the queries, that a build takes where the user leaves them open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hdexport.attention.registry import attention_type_named
from hdexport.checkpoint.checkpoint import Checkpoint
from hdexport.checkpoint.config import HIERARCHICAL_KEY, hierarchical_alpha
from hdexport.checkpoint.extended_files import Extension, read_extension
from hdexport.model.family import Family, UnsupportedReason
from hdexport.model.positions import DEFAULT_ALPHA, check_options
from hdexport.model.task import TASKS
from hdruntime.bundle.manifest import AttentionScale, Scheme, Task
from hdruntime.errors import InputError, Message, Setting

_EMBEDDING_ALPHA = 0.05
"""Alpha of embedding models without further training; measured in docs/positions.md."""


@dataclass(frozen=True, kw_only=True)
class PositionChoice:
    """The choice of a build.

    Attributes:
        scheme: where the rows after the checkpoint's come from.
        alpha: weight of the coarse position in the hierarchical scheme; other schemes ignore it.
        attention_scale: factor of the queries.
        trained: positions that the model was trained with, and the base of the factor.
        reason: why these, as half a sentence.
        force: the options of the other choice, and whom they suit; empty where there is no other.
        remark: which word of the configuration was followed, or overruled by an option; empty where it has none.
    """

    scheme: Scheme = Scheme.HIERARCHICAL
    alpha: float = DEFAULT_ALPHA
    attention_scale: AttentionScale = "none"
    trained: int = 0
    reason: str
    force: Message = ""
    remark: Message = ""

    def describe(self) -> str:
        """The choice in a few words: "hierarchical, alpha 0.05, queries scaled by log n"."""
        alpha = f", alpha {self.alpha:g}" if self.scheme is Scheme.HIERARCHICAL else ""
        return f"{self.scheme}{alpha}{', queries scaled by log n' if self.attention_scale == 'logn' else ''}"


def choose_positions(
    checkpoint: Checkpoint,
    *,
    task: Task,
    max_len: int,
    scheme: Scheme,
    alpha: float | None = None,
    attention_scale: AttentionScale | None = None,
    attention: Mapping[str, Any],
) -> PositionChoice:
    """Chooses alpha and the factor of the queries where they are None. `max_len` is the longest input in tokens;
    `attention` has requests by the names of attention types, not all of which can scale queries."""
    family = checkpoint.family
    reason = _scale_unsupported_reason(family)
    if reason is not None and attention_scale == "logn":
        raise InputError(
            Setting("attention_scale", "logn"),
            f" does not fit this {checkpoint.config['model_type']}. {reason}",
            hint=("Use ", Setting("attention_scale", "none"), "."),
        )
    base = max_len if family.relative_positions else checkpoint.base_positions
    if max_len > base and family.keeps_table:
        raise InputError(
            Setting("max_len", max_len),
            f" is above the {base} positions of this {checkpoint.config['model_type']}, which cannot be extended. "
            f"{UnsupportedReason.NO_FAMILY}",
            hint=("Use ", Setting("max_len", base), " or less."),
        )
    extension = read_extension(checkpoint.config, checkpoint.path / "config.json")
    scalable = all(attention_type_named(name).scales_queries for name in attention)
    chosen = (
        PositionChoice(reason="scores are of distances, of which there are any number")
        if family.relative_positions
        else _as_they_are(base, extension)
        if max_len <= base
        else _beyond(checkpoint, task, scheme, extension, scalable)
    )
    configured = configured_alpha(checkpoint) if max_len > base else None
    remark = "" if configured is None else configuration_remark(configured, scheme=scheme, alpha=alpha)
    if alpha is not None or attention_scale is not None:
        chosen = replace(chosen, reason="as the options say", force="")
    chosen = replace(
        chosen,
        scheme=scheme,
        alpha=chosen.alpha if alpha is None else alpha,
        attention_scale=attention_scale or chosen.attention_scale,
        trained=base if extension is None else extension.base,
        remark=remark,
    )
    # Computed positions have no table to extend: they take any length, as tiling does.
    extended = scheme if family.learned_positions else Scheme.TILE
    check_options(scheme=extended, alpha=chosen.alpha, max_len=max_len, base=base)
    return chosen


def _scale_unsupported_reason(family: Family) -> UnsupportedReason | None:
    if family.is_generic:
        return UnsupportedReason.NO_FAMILY
    if family.relative_positions:
        return UnsupportedReason.RELATIVE_SCALE
    return UnsupportedReason.CAUSAL_SCALE if family.is_causal else None


def configured_alpha(checkpoint: Checkpoint) -> float | None:
    """The alpha that a checkpoint's configuration asks for; None where it asks for none, or positions were
    added since."""
    file = checkpoint.path / "config.json"
    if read_extension(checkpoint.config, file) is not None or not checkpoint.family.learned_positions:
        return None
    return hierarchical_alpha(checkpoint.config, file)


def configuration_remark(configured: float, *, scheme: Scheme, alpha: float | None) -> Message:
    """A line on whether `hierarchical_position`, whose alpha is `configured`, or the options count."""
    key = f"{HIERARCHICAL_KEY} of the configuration (alpha {configured:g})"
    if scheme is not Scheme.HIERARCHICAL:
        return ("Positions: ", Setting("scheme", scheme), f" overrules {key}.")
    if alpha is not None and alpha != configured:
        return ("Positions: ", Setting("alpha", alpha), f" overrules {key}.")
    return f"Positions: hierarchical, as {key} says."


def _as_they_are(base: int, extension: Extension | None) -> PositionChoice:
    """A table that is long enough; one that was tuned with a factor needs it."""
    if extension is None:
        return PositionChoice(reason=f"the checkpoint has {base} positions")
    maker = "tune" if extension.tuned else "extend"
    return PositionChoice(
        attention_scale=extension.attention_scale,
        reason=f"the checkpoint's {base} positions are used as hdexport {maker} wrote them",
    )


def _beyond(
    checkpoint: Checkpoint, task: Task, scheme: Scheme, extension: Extension | None, scalable: bool
) -> PositionChoice:
    family = checkpoint.family
    if extension is not None:
        return PositionChoice(
            alpha=extension.alpha or DEFAULT_ALPHA,
            attention_scale=extension.attention_scale,
            reason="as the checkpoint was extended before",
        )
    if not family.learned_positions:
        return PositionChoice(reason="the model computes its positions")
    if (alpha := configured_alpha(checkpoint)) is not None:
        return PositionChoice(alpha=alpha, reason=f"as {HIERARCHICAL_KEY} of the configuration says")
    # A factor needs a logarithm to divide by; families with attention of their own were trained with it on long texts.
    scale: AttentionScale = (
        "logn" if scalable and family.native_attention is None and checkpoint.base_positions > 1 else "none"
    )
    trainable, as_it_is = _options(scheme, DEFAULT_ALPHA, "none"), _options(scheme, _EMBEDDING_ALPHA, scale)
    if trainable == as_it_is:
        return PositionChoice(reason="as the options say")
    if TASKS[task].vectors is None:
        return PositionChoice(
            reason=f"for a {task} model that is fine-tuned on long texts",
            force=("without fine-tuning: ", *as_it_is),
        )
    return PositionChoice(
        alpha=_EMBEDDING_ALPHA,
        attention_scale=scale,
        reason="best for embeddings without fine-tuning",
        force=("before fine-tuning: ", *trainable),
    )


def _options(scheme: Scheme, alpha: float, scale: AttentionScale) -> tuple[str | Setting, ...]:
    weight = (Setting("alpha", alpha), " ") if scheme is Scheme.HIERARCHICAL else ()
    return (*weight, Setting("attention_scale", scale))
