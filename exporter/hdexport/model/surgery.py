"""Changes to a PyTorch model before it is traced or saved: longer positions, folded constants."""

from __future__ import annotations

__all__ = ["extend_positions", "fold_positions", "fold_token_types"]

from typing import TYPE_CHECKING

import torch

from hdexport.model.family import Family
from hdexport.model.positions import FactoredTable, Form, Scheme, choose_form, extend_table, factor_table
from hdruntime.bundle.manifest import Positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FactoredPositionEmbedding(torch.nn.Module):
    """A position table as two small ones: row k is ``low[k % base] + high[k // base]``.

    The padding row of a RoBERTa-like table stays in front of ``low`` and takes no part in the sum.
    """

    def __init__(self, padding_rows: torch.Tensor, table: FactoredTable) -> None:
        super().__init__()
        low = torch.from_numpy(table.low)
        high = torch.zeros(1, low.shape[1]) if table.high is None else torch.from_numpy(table.high)
        self.first_row, self.base = len(padding_rows), len(low)
        self.has_shift = table.high is not None
        self.low = torch.nn.Parameter(torch.cat([padding_rows, low]))
        self.high = torch.nn.Parameter(high)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up rows of the table that this stands for.

        Args:
            rows: [1 or batch, tokens], int64, from 0.

        Returns:
            [1 or batch, tokens, width].
        """
        position = (rows - self.first_row).clamp(min=0)
        low = torch.nn.functional.embedding(position % self.base + self.first_row, self.low)
        if self.has_shift:
            shift = torch.nn.functional.embedding(position // self.base, self.high)
            low = low + shift
        if self.first_row:
            padding = torch.nn.functional.embedding(rows.clamp(max=self.first_row - 1), self.low)
            low = torch.where((rows < self.first_row).unsqueeze(-1), padding, low)
        return low


class _FirstRows(torch.nn.Module):
    """A folded table whose rows are taken from the top: positions that count from 0 need no lookup."""

    def __init__(self, table: torch.nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # narrow, where slicing would clamp the length to the table and hide an input that is too long.
        return self.weight.narrow(0, 0, rows.shape[-1]).unsqueeze(0)


class _CountedRows(torch.nn.Module):
    """`_FirstRows` by lookup, for a factored table: the ids are made in the graph, not sliced from a buffer.

    Also for a table of one row, which no example of two tokens, the fewest that stay dynamic, could be cut from.
    """

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.table(torch.arange(rows.shape[-1], device=rows.device).unsqueeze(0))
        return embedded


class _ConstantTokenType(torch.nn.Module):
    """The one token-type row that a model without ``token_type_ids`` ever uses."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(embedding.weight.detach()[0].clone())

    def forward(self, token_type_ids: torch.Tensor) -> torch.Tensor:
        return self.row


def extend_positions(
    model: PreTrainedModel, family: Family, *, max_len: int, scheme: Scheme, alpha: float, itemsize: int = 4
) -> Positions:
    """Give a model `max_len` positions, in place; ids, buffers and limits grow with the table.

    Args:
        model: a model in float32.
        family: its family.
        max_len: positions wanted; fewer than the checkpoint's cuts the table.
        scheme: where rows past the checkpoint's come from.
        alpha: weight of the coarse position in the hierarchical scheme.
        itemsize: bytes of a number in the graph to come, for the choice between the folded and the factored form.

    Returns:
        What was done, as the manifest records it.

    Raises:
        InputError: the options do not fit; see `hdexport.model.positions.check_options`.
    """
    if not family.learned_positions:
        base, model.config.max_position_embeddings = int(model.config.max_position_embeddings), max_len
        return Positions(
            scheme=Scheme.NONE.value, alpha=None, base=base, rows=max_len, first_row=0, form=Form.COMPUTED.value
        )
    embeddings = family.embeddings(model)
    first_row = family.first_row(model.config)
    table = embeddings.position_embeddings.weight.detach().numpy()
    base, width = len(table) - first_row, table.shape[1]
    form = choose_form(max_len, base=base, width=width, itemsize=itemsize)
    if form is Form.FOLDED:
        extended = torch.from_numpy(extend_table(table, max_len, scheme=scheme, alpha=alpha, first_row=first_row))
        embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(extended, freeze=False)
    else:
        factors = factor_table(table, max_len, scheme=scheme, alpha=alpha, first_row=first_row)
        embeddings.position_embeddings = FactoredPositionEmbedding(torch.from_numpy(table[:first_row].copy()), factors)
    rows = first_row + max_len
    embeddings.position_ids = torch.arange(rows).expand((1, -1))
    if hasattr(embeddings, "token_type_ids"):
        embeddings.token_type_ids = torch.zeros(1, rows, dtype=torch.long)
    setattr(model.config, family.positions_key, rows)
    return Positions(
        scheme=scheme.value,
        alpha=alpha if scheme is Scheme.HIERARCHICAL else None,
        base=base,
        rows=max_len,
        first_row=first_row,
        form=form.value,
    )


def fold_positions(model: PreTrainedModel, family: Family) -> bool:
    """Take the rows of positions that count from 0 straight from the table, in place.

    Where positions follow the padding rule the lookup has to stay: which row a token uses depends on its text.

    Returns:
        Whether the lookup was folded; the embeddings then look at the shape of ``position_ids`` only.
    """
    if family.first_row(model.config) or not family.learned_positions:
        return False
    embeddings = family.embeddings(model)
    table = embeddings.position_embeddings
    sliceable = isinstance(table, torch.nn.Embedding) and table.num_embeddings > 1
    embeddings.position_embeddings = _FirstRows(table) if sliceable else _CountedRows(table)
    return True


def fold_token_types(model: PreTrainedModel, family: Family) -> bool:
    """Replace the token-type lookup by its row 0, in place.

    Returns:
        Whether the model has token types at all.
    """
    embeddings = family.embeddings(model)
    if not hasattr(embeddings, "token_type_embeddings"):
        return False
    embeddings.token_type_embeddings = _ConstantTokenType(embeddings.token_type_embeddings)
    return True
