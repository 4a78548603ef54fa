"""A position table in training: which of its rows move, and how."""

from __future__ import annotations

__all__ = ["TunedRows"]

import torch


class TunedRows(torch.nn.Module):
    """A position table whose rows after the checkpoint's are trained; it takes the place of the embedding.

    A row is its start, plus a shift that all trained rows share, plus one that neighbouring rows share, plus a
    difference of its own. Every long text moves the shifts, whereas a single row gets a thousandth of a text's
    gradient, and the last rows are seen by the longest texts only. Neighbours' shifts are given at every `base` rows
    and are linear between.

    Args:
        table: [rows, width], float32, the start.
        first: the first row that is trained.
        base: rows between two shifts.
        all_rows: whether the rows before `first` are trained, too.
    """

    before: torch.Tensor
    share: torch.Tensor

    def __init__(self, table: torch.Tensor, *, first: int, base: int, all_rows: bool = False) -> None:
        super().__init__()
        count, width = len(table) - first, table.shape[1]
        self.first = first
        self.start = torch.nn.Parameter(table.clone(), requires_grad=all_rows)
        self.shift = torch.nn.Parameter(torch.zeros(1, width))
        self.shifts = torch.nn.Parameter(torch.zeros(-(-max(count, 1) // base) + 1, width))
        self.own = torch.nn.Parameter(torch.zeros(count, width))
        place = torch.arange(count) / base
        self.register_buffer("before", place.long(), persistent=False)
        self.register_buffer("share", (place - place.floor()).unsqueeze(1), persistent=False)

    def table(self) -> torch.Tensor:
        """[rows, width], float32, as it is now; rows before `first` are the start's, bit for bit, unless trained."""
        shift = self.shift + torch.lerp(self.shifts[self.before], self.shifts[self.before + 1], self.share)
        return torch.cat([self.start[: self.first], self.start[self.first :] + shift + self.own])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up rows: [1 or batch, tokens], int64, gives [1 or batch, tokens, width]."""
        return torch.nn.functional.embedding(rows, self.table())
