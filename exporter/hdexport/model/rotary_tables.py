"""Rotary positions from tables: cosines and sines of every position, in float32 with models of any type.

A family whose model has the library's rotary embedding calls `use_rotary_tables` from its `adapt`::

    def _adapt(model: PreTrainedModel) -> None:
        use_rotary_tables(model)

That is all where the library turns queries and keys itself and hands them to its attention interface: they are
promoted to float32 by the tables, and `hdexport.attention.interface` rounds them back to the type of the values. It
works for one kind of layer (``inv_freq``) and for several (``full_attention_inv_freq``), and for heads of which only a
part turns, as the frequencies have it. Pairs are half a head apart.

A family whose attention is its own makes a `RotaryTable`, and turns queries and keys with `turned`.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies change with the length of the text."""

_FREQUENCIES = "inv_freq"
"""How the library names the buffer, after the kind of layer where there are several."""

_FEWEST_ROWS = 2
"""Fewest rows of a table: a graph is traced with two tokens at least, and one row would be repeated for a long text."""

_PROBED_POSITIONS = 5


class RotaryTable(torch.nn.Module):
    """Cosines and sines of positions from 0.

    Angles are rounded to the type of the frequencies, as the library rounds them: float32 angles are off by up to
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
        # narrow, where slicing would clamp: a text that is too long must fail.
        return self.cosines.narrow(0, 0, tokens), self.sines.narrow(0, 0, tokens)


def turned(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Queries or keys, [batch, heads, tokens, head_dim], turned in float32; pairs are half a head apart.

    They are turned in the operators that the library has, too: backends know them. Cosines and sines are
    [tokens, head_dim], float32: a table's, twice side by side.
    """
    exact, pairs = states.float(), states.shape[-1] // 2
    # Slices, not chunks: backends make one operator of the whole.
    first, second = exact[..., :pairs], exact[..., pairs:]
    return (exact * cosines + torch.cat((-second, first), dim=-1) * sines).to(states.dtype)


def use_rotary_tables(model: PreTrainedModel) -> None:
    """Replace the library's rotary embeddings, whose frequencies are in float32, by tables, in place.

    The tables have as many positions as the model's configuration now says, and as the bundle serves. All layers share
    them. Token i has position i, wherever padding is, as in the library. A ModelError refuses frequencies that depend
    on the length of a text, and tables that the library lays out in an unknown way.
    """
    parents = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _kinds(child) and not isinstance(child, RotaryTable)
    ]
    for parent, name, rotary in parents:
        _refuse_length_dependent(rotary)
        setattr(parent, name, _LibraryTables(rotary, int(model.config.max_position_embeddings)))


def _kinds(module: torch.nn.Module) -> list[str]:
    """Kinds of layers of a rotary embedding; ``""`` where it has one for all; none of another module."""
    if not hasattr(module, "rope_type"):
        return []
    names = (name for name, _ in module.named_buffers(recurse=False) if name.endswith(_FREQUENCIES))
    return sorted(name.removesuffix(_FREQUENCIES).rstrip("_") for name in names if "original_" not in name)


def _refuse_length_dependent(rotary: Any) -> None:
    types = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    refused = sorted({kind for kind in types if kind in _LENGTH_DEPENDENT})
    if refused:
        raise ModelError(
            f"The rotary positions of kind {refused[0]!r} change with the length of a text; a graph cannot do that.\n"
            "Choose a checkpoint whose rope_parameters have a fixed rope_type: default, linear, yarn or llama3."
        )


class _Answers:
    """To the last question. Not a module, so that nothing takes a batch for a part of the model."""

    position_ids: torch.Tensor | None = None
    of_kind: dict[str, tuple[torch.Tensor, torch.Tensor]]


class _LibraryTables(torch.nn.Module):
    """Answers as a rotary embedding of the library, in float32 and from tables.

    The library asks for one kind of layer after the other in the order of a set, which is another in every process. The
    first request for a batch is answered for all kinds, in one order, so that a checkpoint always becomes the same
    graph.
    """

    def __init__(self, rotary: Any, positions: int) -> None:
        super().__init__()
        self._kinds = _kinds(rotary)
        for kind in self._kinds:
            _check_layout(rotary, kind)
            self.add_module(_table_name(kind), _table(rotary, kind, positions))
        self._answers = _Answers()

    def forward(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, both [1, tokens, numbers that turn]; of the positions, only their number is looked at."""
        if position_ids is not self._answers.position_ids:
            self._answers.position_ids = position_ids
            self._answers.of_kind = {kind: self._of_kind(kind, position_ids.shape[-1]) for kind in self._kinds}
        return self._answers.of_kind[layer_type or ""]

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
    """[positions, numbers that turn], of a value per pair, [positions, pairs]: pairs are half a head apart."""
    return torch.cat((table, table), dim=-1)


def _check_layout(rotary: Any, kind: str) -> None:
    """Refuse, by a ModelError, an embedding that lays out its cosines in another way than `_of_heads`."""
    positions = torch.arange(_PROBED_POSITIONS)
    asked = (torch.zeros(1, _PROBED_POSITIONS, 1), positions[None])
    theirs = rotary(*asked, kind) if kind else rotary(*asked)
    ours = _table(rotary, kind, _PROBED_POSITIONS)(_PROBED_POSITIONS)
    if not all(_agree(_of_heads(table), other) for table, other in zip(ours, theirs, strict=True)):
        raise ModelError(
            f"{type(rotary).__name__} lays out its cosines in a way that hdexport does not know: "
            f"{list(theirs[0].shape)} for {_PROBED_POSITIONS} positions and {ours[0].shape[1]} frequencies.\n"
            "Please report the model and the versions that `hdexport doctor` prints."
        )


def _agree(table: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether the library's first positions are the table's; it may repeat them for each text."""
    return table.shape == theirs.shape[-2:] and torch.allclose(theirs.float(), table.expand_as(theirs), atol=1e-5)
