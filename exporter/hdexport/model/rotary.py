"""Rotary positions: as tables, and stretched for longer texts (NTK-aware).

Position p turns the i-th pair of a head's numbers by p * theta^(-2i / head_dim). With a larger theta the slow pairs
turn less, and the fast ones, by which near tokens are told apart, nearly as before.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.model.family import Family, UnsupportedReason
from hdruntime.bundle.manifest import Positions
from hdruntime.errors import InputError, ModelError, Setting

_LAYERS = "full_attention"
"""Layers whose positions are stretched, where a model has several kinds of them.

Windowed layers see no further in a long text than in texts of training.
"""

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies change with the length of the text."""

_FREQUENCIES = "inv_freq"
"""How transformers names the buffer, after the kind of layer where there are several."""

_FEWEST_ROWS = 2
"""Fewest rows of a table: a graph is traced with two tokens at least, and one row would be repeated for a long text."""

_PROBED_POSITIONS = 5


def check_rope_factor(factor: float, family: Family, positions: Positions, *, model_type: str) -> None:
    """Reject a factor, above 1, of the base of rotary positions that a model has no use for.

    An InputError says that positions are learned, or that no text is longer than the trained ones; a ModelError, that
    they are computed in a way that has no base here.
    """
    option = Setting("rope_factor", factor)
    if family.learned_positions:
        raise InputError(
            option,
            f" is for rotary positions, and those of {model_type} are learned.",
            hint=("Leave it out; ", Setting("scheme"), " says where positions after the checkpoint's come from."),
        )
    if not family.scales_rope:
        reason = f" {UnsupportedReason.NO_FAMILY}" if family.is_generic else ""
        raise ModelError(
            option,
            f" cannot scale the positions of {model_type}.{reason}",
            hint=("Leave ", Setting("rope_factor"), " out."),
        )
    if positions.rows <= positions.base:
        raise InputError(
            option,
            f" changes all outputs, for texts longer than the {positions.base} tokens of training; ",
            Setting("max_len", positions.rows),
            " allows none.",
            hint=("Leave it out, or use a larger ", Setting("max_len"), "."),
        )


def stretch_rotary(model: PreTrainedModel, factor: float) -> None:
    """Multiply the base of the rotary positions of layers that attend to the whole text, in place.

    A ModelError rejects positions that are scaled already.
    """
    rotary: Any = model.base_model.rotary_emb
    parameters = _parameters(model)
    name = f"{_LAYERS}_inv_freq" if hasattr(rotary, f"{_LAYERS}_inv_freq") else "inv_freq"
    frequencies = getattr(rotary, name)  # [head_dim / 2]
    head_dim = 2 * len(frequencies)
    theta = parameters["rope_theta"] * factor
    powers = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    # Rounded as transformers would: an error of 1e-7 is one of 1e-3 at position 10000.
    setattr(rotary, name, 1.0 / theta**powers)


def use_stretched_rotary(model: PreTrainedModel, factor: float) -> None:
    """Scale rotary positions by transformers' code, from a changed configuration: the reference of a bundle."""
    base: Any = model.base_model
    _parameters(model)["rope_theta"] *= factor
    base.rotary_emb = type(base.rotary_emb)(model.config)


def _parameters(model: PreTrainedModel) -> dict[str, Any]:
    parameters: dict[str, Any] = model.config.rope_parameters
    parameters = parameters.get(_LAYERS, parameters)
    if parameters["rope_type"] != "default":
        raise ModelError(
            Setting("rope_factor"),
            " scales rotary positions of the type 'default', and the checkpoint's rope_parameters have the rope_type "
            f"{parameters['rope_type']!r}, which scales them already.",
            hint=("Leave ", Setting("rope_factor"), " out."),
        )
    return parameters


class RotaryTable(torch.nn.Module):
    """Cosines and sines of positions from 0.

    Angles are rounded to the type of the frequencies, as transformers rounds them: float32 angles are off by up to
    2.4e-4 at position 8191, and the model was trained with them. Their cosines and sines are computed in float64.

    Args:
        frequencies: [pairs], angles between neighbouring positions, in radians.
        positions: rows of the tables; a text of more tokens fails.
        scaling: factor of cosines and sines.
    """

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, frequencies: torch.Tensor, positions: int, *, scaling: float = 1.0) -> None:
        super().__init__()
        rows = torch.arange(max(positions, _FEWEST_ROWS), dtype=frequencies.dtype)
        angles = (rows[:, None] * frequencies.detach()).double()
        self.register_buffer("cosines", (angles.cos() * scaling).float(), persistent=False)
        self.register_buffer("sines", (angles.sin() * scaling).float(), persistent=False)

    def forward(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the first positions, both [tokens, pairs], float32."""
        # Tensor.narrow, where slicing would clamp: a text that is too long must fail.
        return self.cosines.narrow(0, 0, tokens), self.sines.narrow(0, 0, tokens)


def rotated(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys, [batch, tokens, heads, head_dim], in float32; pairs are half a head apart.

    The operators are those of transformers, which backends know. Cosines and sines are
    [1, tokens, 1, head_dim], float32: a table's, twice side by side.
    """
    exact, pairs = states.float(), states.shape[-1] // 2
    # Slices, not chunks: backends make one operator of the whole.
    first, second = exact[..., :pairs], exact[..., pairs:]
    return (exact * cosines + torch.cat((-second, first), dim=-1) * sines).to(states.dtype)


def use_rotary_tables(model: PreTrainedModel) -> None:
    """Replace transformers' rotary embeddings, whose frequencies are in float32, by tables, in place.

    The tables have as many positions as the model's configuration now says, and as the bundle serves. All layers share
    them. Token i has position i, wherever padding is, as in transformers. A ModelError rejects frequencies that depend
    on the length of a text, and tables that transformers lays out in an unknown way.
    """
    parents = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _kinds(child) and not isinstance(child, RotaryTable)
    ]
    for parent, name, rotary in parents:
        _reject_length_dependent(rotary)
        setattr(parent, name, _TransformersTables(rotary, int(model.config.max_position_embeddings)))


def _kinds(module: torch.nn.Module) -> list[str]:
    """Kinds of layers of a rotary embedding; ``""`` where it has one for all; none of another module."""
    if not hasattr(module, "rope_type"):
        return []
    names = (name for name, _ in module.named_buffers(recurse=False) if name.endswith(_FREQUENCIES))
    return sorted(name.removesuffix(_FREQUENCIES).rstrip("_") for name in names if "original_" not in name)


def _reject_length_dependent(rotary: Any) -> None:
    types = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    rejected = sorted({kind for kind in types if kind in _LENGTH_DEPENDENT})
    if rejected:
        raise ModelError(
            f"The rotary positions of kind {rejected[0]!r} change with the length of a text; a graph cannot do that.",
            hint="Choose a checkpoint whose rope_parameters have a fixed rope_type: default, linear, yarn or llama3.",
        )


class _LatestTables:
    """The tables of the last batch. Not a module, so that nothing takes a batch for a part of the model."""

    position_ids: torch.Tensor | None = None
    of_kind: dict[str, tuple[torch.Tensor, torch.Tensor]]


class _TransformersTables(torch.nn.Module):
    """A rotary embedding with the interface of transformers, in float32 and from tables.

    transformers asks for one kind of layer after the other in the order of a set, which is another in every process.
    The first request for a batch computes all kinds, in one order, so that a checkpoint always becomes the same graph.
    """

    def __init__(self, rotary: Any, positions: int) -> None:
        super().__init__()
        self._kinds = _kinds(rotary)
        for kind in self._kinds:
            _check_layout(rotary, kind)
            self.add_module(_table_name(kind), _table(rotary, kind, positions))
        self._latest = _LatestTables()

    def forward(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, both [1, tokens, rotary_dim]; of the positions, only their number is looked at."""
        if position_ids is not self._latest.position_ids:
            self._latest.position_ids = position_ids
            self._latest.of_kind = {kind: self._of_kind(kind, position_ids.shape[-1]) for kind in self._kinds}
        return self._latest.of_kind[layer_type or ""]

    def _of_kind(self, kind: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = getattr(self, _table_name(kind))(tokens)
        return _of_heads(cosines)[None], _of_heads(sines)[None]


def _table_name(kind: str) -> str:
    return f"{kind}_table" if kind else "table"


def _table(rotary: Any, kind: str, positions: int) -> RotaryTable:
    prefix = f"{kind}_" if kind else ""
    frequencies = getattr(rotary, prefix + _FREQUENCIES)  # [pairs]
    return RotaryTable(frequencies, positions, scaling=float(getattr(rotary, f"{prefix}attention_scaling")))


def _of_heads(table: torch.Tensor) -> torch.Tensor:
    """[positions, rotary_dim], of a value per pair, [positions, pairs]: pairs are half a head apart."""
    return torch.cat((table, table), dim=-1)


def _check_layout(rotary: Any, kind: str) -> None:
    """Reject, by a ModelError, an embedding that lays out its cosines in another way than `_of_heads`."""
    positions = torch.arange(_PROBED_POSITIONS)
    arguments = (torch.zeros(1, _PROBED_POSITIONS, 1), positions[None])
    theirs = rotary(*arguments, kind) if kind else rotary(*arguments)
    ours = _table(rotary, kind, _PROBED_POSITIONS)(_PROBED_POSITIONS)
    if not all(_agree(_of_heads(table), other) for table, other in zip(ours, theirs, strict=True)):
        raise ModelError(
            f"{type(rotary).__name__} lays out its cosines in a way that hdexport does not know: "
            f"{list(theirs[0].shape)} for {_PROBED_POSITIONS} positions and {ours[0].shape[1]} frequencies.",
            hint="Please report the model and the versions that `hdexport doctor` prints.",
        )


def _agree(table: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether transformers' first positions are the table's; it may repeat them for each text."""
    return table.shape == theirs.shape[-2:] and torch.allclose(theirs.float(), table.expand_as(theirs), atol=1e-5)
