"""Changes to a PyTorch model before it is traced or saved: longer positions, folded constants."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import FastGELUActivation, NewGELUActivation

from hdexport.model.family import Family
from hdexport.model.memory_cache import POSITION, MemoryCache
from hdexport.model.positions import FactoredTable, choose_form, extend_table, factor_table
from hdexport.model.task import model_task
from hdruntime.bundle.manifest import PositionForm, Positions, Scheme, Task
from hdruntime.errors import ModelError


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
        """Look up rows, [1 or batch, tokens], int64, of the table that this stands for: [1 or batch, tokens, width]."""
        position = (rows - self.first_row).clamp(min=0)
        low = torch.nn.functional.embedding(position % self.base + self.first_row, self.low)
        if self.has_shift:
            shift = torch.nn.functional.embedding(position // self.base, self.high)
            low = low + shift
        if self.first_row:
            padding = torch.nn.functional.embedding(rows.clamp(max=self.first_row - 1), self.low)
            low = torch.where((rows < self.first_row).unsqueeze(-1), padding, low)
        return low


class _TextMask:
    """The mask of the current batch: noted on the way in, for modules that are given positions only.

    Not a module, so that nothing takes a batch for a part of the model.
    """

    mask: torch.Tensor

    def note(self, model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Look at a model's arguments, as a forward pre-hook."""
        ids = named["input_ids"] if "input_ids" in named else arguments[0]
        mask = named.get("attention_mask", arguments[1] if len(arguments) > 1 else None)
        self.mask = torch.ones_like(ids) if mask is None else mask


class PositionsByLength(torch.nn.Module):
    """Rows of a checkpoint's table, [L, width], that each text spreads over its own length.

    With n real tokens of which a token is the p-th, from 0, and m = max(n, L): interpolation reads at p L / m between
    two rows, grouping reads row p // ceil(m / L). A text of up to L tokens reads row p, bit for bit. Positions count
    real tokens, wherever padding is; a token of padding has the position of the real token before it.
    """

    def __init__(self, rows: torch.Tensor, scheme: Scheme, text: _TextMask) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(rows)
        self.scheme, self._text = scheme, text

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up each token's position: [batch, tokens, width], of the table's dtype.

        Of the rows, [1 or batch, tokens], only the number of tokens is looked at, which may exceed the text's, where
        transformers pads by itself.
        """
        mask = self._text.mask.to(torch.int64)
        place = (mask.cumsum(1) - 1).clamp(min=0)  # [batch, tokens]
        base = len(self.weight)
        length = mask.sum(1, keepdim=True).clamp(min=base)  # [batch, 1]
        if self.scheme is Scheme.GROUP:
            result = self._row(place // ((length + (base - 1)) // base))
        else:
            # In integers, which are exact at any length and equal on every backend.
            row = place * base // length
            weight = ((place * base - row * length).float() / length.float()).unsqueeze(-1)
            low, high = self._row(row).float(), self._row((row + 1).clamp(max=base - 1)).float()
            result = (low + weight * (high - low)).to(self.weight.dtype)
        extra = rows.shape[1] - mask.shape[1]
        return result if extra == 0 else torch.nn.functional.pad(result, (0, 0, 0, extra))

    def _row(self, row: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(row, self.weight)


class _ContinuedRows(torch.nn.Module):
    """A table whose positions continue from call to call: a real token's row lies behind the rows of earlier calls.

    A token of padding has the row that it would have in a first call, which the table has however long the document.
    """

    def __init__(self, table: torch.nn.Module, first_row: int, memory_cache: MemoryCache, text: _TextMask) -> None:
        super().__init__()
        self.table, self.first_row = table, first_row
        self._memory_cache, self._text = memory_cache, text

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up each token's position, [batch, tokens, width], by its row in a first call, [1 or batch, tokens],
        int64.
        """
        before = self._memory_cache.read(POSITION)  # [batch, 1]
        real = self._text.mask.to(torch.int64)
        if self.first_row:
            # The padding id has the padding row wherever it is, and counts for nothing.
            real = real * (rows >= self.first_row)
        self._memory_cache.write(POSITION, before + real.sum(1, keepdim=True))
        return self.table(rows + before.to(torch.int64) * real)


class _FirstRows(torch.nn.Module):
    """A folded table whose rows are taken from the top: positions that count from 0 need no lookup."""

    def __init__(self, table: torch.nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # Tensor.narrow, where slicing would clamp the length to the table and hide an input that is too long.
        return self.weight.narrow(0, 0, rows.shape[-1]).unsqueeze(0)


class _CountedRows(torch.nn.Module):
    """`_FirstRows` by lookup, for a factored table: the ids are made in the graph, not sliced from a buffer.

    Also for a table of one row, which no example of two tokens, the fewest that stay dynamic, could be cut from.
    """

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table(torch.arange(rows.shape[-1], device=rows.device).unsqueeze(0))


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
    """Give a model in float32 `max_len` positions, in place, and return the changes, as the manifest records them.

    Ids, buffers and limits grow with their number. An InputError says that the options do not fit.

    Args:
        max_len: positions wanted; fewer than the checkpoint's cuts the table.
        alpha: weight of the coarse position in the hierarchical scheme.
        itemsize: bytes of a number in the graph to come, for the choice between the folded and the factored form.
    """
    family.prepare(model)
    if not family.learned_positions:
        base, form, first_row = max_len, PositionForm.DISTANCES, family.first_row(model.config)
        if not family.relative_positions:
            form = PositionForm.FOLDED if family.keeps_table else PositionForm.COMPUTED
            base = int(model.config.max_position_embeddings) - first_row
            model.config.max_position_embeddings = first_row + max_len
        return Positions(scheme=Scheme.NONE, alpha=None, base=base, rows=max_len, first_row=first_row, form=form)
    embeddings = family.embeddings(model)
    first_row = family.first_row(model.config)
    table = embeddings.position_embeddings.weight.detach().numpy()
    base, width = len(table) - first_row, table.shape[1]
    form = choose_form(scheme, max_len, base=base, width=width, itemsize=itemsize)
    if form is PositionForm.BY_LENGTH:
        text = _TextMask()
        model.base_model.register_forward_pre_hook(text.note, with_kwargs=True)
        rows_of_checkpoint = torch.from_numpy(table[first_row:].copy())
        embeddings.position_embeddings = PositionsByLength(rows_of_checkpoint, scheme, text)
    elif form is PositionForm.FOLDED:
        extended = torch.from_numpy(extend_table(table, max_len, scheme=scheme, alpha=alpha, first_row=first_row))
        embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(extended, freeze=False)
    else:
        factors = factor_table(table, max_len, scheme=scheme, alpha=alpha, first_row=first_row)
        embeddings.position_embeddings = FactoredPositionEmbedding(torch.from_numpy(table[:first_row].copy()), factors)
    rows = first_row + max_len
    embeddings.position_ids = torch.arange(rows).expand((1, -1))
    if hasattr(embeddings, "token_type_ids"):
        embeddings.token_type_ids = torch.zeros(1, rows, dtype=torch.long)
    if hasattr(embeddings, "max_position_embeddings"):
        embeddings.max_position_embeddings = rows
    setattr(model.config, family.positions_key, rows)
    return Positions(
        scheme=scheme,
        alpha=alpha if scheme is Scheme.HIERARCHICAL else None,
        base=base,
        rows=max_len,
        first_row=first_row,
        form=form,
    )


def continue_positions(model: PreTrainedModel, family: Family, memory_cache: MemoryCache) -> None:
    """Make positions, of a family that learns them, continue from call to call, in place.

    A table has extended them to as many as a document has tokens; `POSITION` is among the recurrent states.
    """
    text, embeddings = _TextMask(), family.embeddings(model)
    model.base_model.register_forward_pre_hook(text.note, with_kwargs=True)
    embeddings.position_embeddings = _ContinuedRows(
        embeddings.position_embeddings, family.first_row(model.config), memory_cache, text
    )


def fold_positions(model: PreTrainedModel, family: Family) -> bool:
    """Take the rows of positions that count from 0 straight from the table, in place, and return whether it
    was done.

    The embeddings then look at the shape of ``position_ids`` only. Where positions follow the padding rule the lookup
    has to stay: which row a token uses depends on its text. Positions by each text's length find the tokens by
    themselves, and positions that continue are looked up.
    """
    if not family.learned_positions:
        return False
    embeddings = family.embeddings(model)
    table = embeddings.position_embeddings
    if isinstance(table, PositionsByLength):
        return True
    if family.first_row(model.config):
        return False
    sliceable = isinstance(table, torch.nn.Embedding) and table.num_embeddings > 1
    embeddings.position_embeddings = _FirstRows(table) if sliceable else _CountedRows(table)
    return True


def number_of_token_types(model: PreTrainedModel, family: Family, task: Task) -> int:
    """Types that a token may have in a model that was loaded to run as a task; 0 without a choice of several.

    Types matter in pairs only: a sentence's tokens have one type, and a table of one row leaves no choice. A ModelError
    says that the model looks types up, and its table has no row.
    """
    if family.token_types is not None:
        return family.token_types
    # Not config.json's type_vocab_size, which models without a table may have, too.
    table = getattr(family.embeddings(model), "token_type_embeddings", None)
    rows = 0 if table is None else len(table.weight)
    if table is not None and not rows:
        raise ModelError(
            "config.json has type_vocab_size 0, but the model adds the vector of a type to every token.",
            hint="Set it to the rows of the checkpoint's table of token types, 1 or more.",
        )
    # A module that sentence-transformers puts after a model reads single texts.
    return rows if model_task(task) is task and rows > 1 else 0


def fold_token_types(model: PreTrainedModel, family: Family) -> bool:
    """Replace the token-type lookup by its row 0, in place, and return whether the model has token types at all."""
    embeddings = family.embeddings(model)
    if getattr(embeddings, "token_type_embeddings", None) is None:
        return False
    embeddings.token_type_embeddings = _ConstantTokenType(embeddings.token_type_embeddings)
    return True


def fuse_gelu(model: torch.nn.Module) -> None:
    """Make the GELU of a tanh, which transformers writes out in powers and products, ONNX's ``Gelu``, in place.

    The library's code takes eight passes over the widest states, between the layers; ``Gelu`` takes one.
    """
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, (FastGELUActivation, NewGELUActivation)):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
