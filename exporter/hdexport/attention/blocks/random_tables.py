"""Tables of the blocks that each block of queries sees: drawn as BigBird's paper draws them, or read from a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.arrays import AnyArray
from hdruntime.errors import InputError, Message, Setting, joined
from hdruntime.folders import special_kind

_DRAWN_FROM_TOKENS = 1024
"""Random blocks begin before this token, wherever the query is: the ``last_idx`` of the paper's code."""

_COUNTS, _INDICES, _PARTIAL_COUNTS = "full_kv_num_blocks", "full_kv_indices", "kv_num_blocks"
"""Arrays of a file of lists, named as PyTorch's ``BlockMask`` names them."""

_SAVE_TABLE = "numpy.save(file, table)"

_SAVE_LISTS = f"numpy.savez(file, {_COUNTS}=..., {_INDICES}=...)"

Blocks = npt.NDArray[np.int32]


def load_arrays(path: Path) -> Any:
    """The array of a ``.npy`` file, or the archive of a ``.npz`` file; for use within `reading`. It is mapped, so that
    a damaged header cannot ask for memory that the file does not fill."""
    # Opening a pipe waits for its writer.
    if (kind := special_kind(path.stat().st_mode)) is not None:
        raise ValueError(f"it is {kind} and no file")
    return np.load(path, mmap_mode="r", allow_pickle=False)


@contextlib.contextmanager
def reading(path: Path, writer: str) -> Iterator[None]:
    """Translate NumPy's errors; `writer` is code that writes such a file."""
    try:
        yield
    except Exception as error:
        # For a damaged file NumPy raises errors of zip archives, of Python's tokenizer and a dozen others; for a file
        # that is not NumPy's own, the error says how to run code in it.
        reason = (
            "it is not a file of NumPy arrays, or it holds Python objects" if "allow_pickle" in str(error) else error
        )
        raise InputError(f"{path} cannot be read: {reason}", hint=f"Write it with {writer}.") from error


def random_table(*, heads: int, max_tokens: int, block_size: int, random_blocks: int, seed: int) -> Blocks:
    """BigBird's random blocks, drawn as the paper's code draws them for texts of 1024, 3072 and 4096 tokens.

    Hugging Face draws the same ones while it trains, with the number of the layer for a seed of NumPy's legacy
    generator. The table is [heads, blocks - 2, random_blocks]: the first and the last block see all and have no row,
    and texts shorter than `max_tokens` use the first rows. An InputError says that a row has fewer blocks to draw from.
    """
    blocks = _blocks_of(max_tokens, block_size)
    choices = [_drawn_from(block, blocks, block_size) for block in range(1, blocks - 1)]
    _check_count(random_blocks, min(map(len, choices), default=0), max_tokens, block_size)
    generator = np.random.RandomState(seed)
    table = [[generator.permutation(row)[:random_blocks] for row in choices] for _ in range(heads)]
    return np.array(table, np.int32)


def read_table(path: Path, *, heads: int, max_tokens: int, block_size: int, layers: int) -> list[Blocks]:
    """The table of each layer, [heads, blocks - 2, random blocks], from a ``.npy`` file.

    The file has integers, [heads, blocks - 2, random blocks] for all layers, or [layers, heads, blocks - 2, random
    blocks]. An InputError says that it holds another array, or lists invalid blocks.
    """
    with reading(path, _SAVE_TABLE):
        table = load_arrays(path)
    if not isinstance(table, np.ndarray):
        raise InputError(f"{path} holds several arrays; a table is one.", hint=f"Write it with {_SAVE_TABLE}.")
    _check_type(path, "the table", table)
    blocks = _blocks_of(max_tokens, block_size)
    shape = (heads, blocks - 2)
    if table.ndim not in (3, 4) or not table.size or table.shape[:-1] not in (shape, (layers, *shape)):
        of_layer = f"{heads}, {blocks - 2}, random blocks]"
        raise InputError(
            f"{path}: the table has the shape {list(table.shape)}; it must be [{of_layer}, or [{layers}, {of_layer}: "
            f"{layers} layers, {heads} heads, and {_sizes(max_tokens, block_size)}, of which the first and the last "
            f"have no row.",
            hint=(
                f"Make a table for a text of {max_tokens} tokens, or build with the table's ",
                Setting("max_len"),
                ".",
            ),
        )
    _check_entries(path, "the table", table, (table < 0) | (table >= blocks), blocks)
    return list(np.broadcast_to(table, (layers, *shape, table.shape[-1])).astype(np.int32))


def read_block_lists(path: Path, *, heads: int, max_tokens: int, block_size: int) -> Blocks:
    """The blocks that each block of queries sees, from a ``.npz`` file in the layout of
    FlexAttention's ``BlockMask``.

    The file has the arrays ``full_kv_num_blocks`` [1 or heads, blocks] and ``full_kv_indices`` [1 or heads, blocks,
    most], integers: how many blocks each block of queries sees, and, the seen ones first, which. An axis for the batch
    may stand in front, of size 1. ``kv_num_blocks``, of partial blocks, may be there and 0. The result is [1 or heads,
    blocks, most], -1 behind a block's entries. An InputError says that the file holds other arrays, or lists invalid or
    partial blocks.
    """
    arrays = _read_arrays(path)
    counts, indices = _without_batch(arrays[_COUNTS], 2), _without_batch(arrays[_INDICES], 3)
    blocks = _blocks_of(max_tokens, block_size)
    _check_shapes(path, counts, indices, heads=heads, blocks=blocks, sizes=_sizes(max_tokens, block_size))
    if counts.min() < 0 or counts.max() > indices.shape[2]:
        raise InputError(
            f"{path}: {_COUNTS} holds {counts.min()} to {counts.max()}, and a row of {_INDICES} has room for 0 to "
            f"{indices.shape[2]} blocks.",
            hint=f"Write both from the same mask: {_SAVE_LISTS}.",
        )
    is_listed = np.arange(indices.shape[2]) < counts[..., None]
    _check_entries(path, _INDICES, indices, is_listed & ((indices < 0) | (indices >= blocks)), blocks)
    # A mask has a column for every block; no more are needed than the longest list has.
    most = max(1, int(counts.max()))
    return np.where(is_listed, indices, -1)[..., :most].astype(np.int32)


def _drawn_from(block: int, blocks: int, block_size: int) -> AnyArray:
    """The blocks that a block's row is drawn from, in the order by which a seed decides."""
    inner = np.arange(1, blocks - 1)  # all but the first and the last, which everyone sees
    end = _DRAWN_FROM_TOKENS // block_size - 1 if 2 * block_size < _DRAWN_FROM_TOKENS else blocks - 1
    if block <= 2:
        return inner[block + 1 : end]
    # As the paper's code has it: these rows may draw the blocks beside them, which they see anyway, once more.
    if block >= blocks - 3 or block - 2 > end:
        return inner[:end]
    before, behind = inner[: block - 2], inner[block + 1 : end]
    return before if block + 1 == end else np.concatenate([before, behind])


def _check_count(random_blocks: int, most: int, max_tokens: int, block_size: int) -> None:
    if 1 <= random_blocks <= most:
        return
    smaller: Message = f"random={most} or fewer" if most else ("a smaller block, a larger ", Setting("max_len"))
    raise InputError(
        f"A table of {random_blocks} random blocks per row cannot be drawn: {_sizes(max_tokens, block_size)}, and "
        f"some rows have only {most} to draw from.",
        hint=joined("Use ", smaller, ", or mode=hf_eval, which draws none."),
    )


def _read_arrays(path: Path) -> dict[str, AnyArray]:
    """The arrays of a file of lists, integers."""
    arrays: dict[str, AnyArray] = {}
    with reading(path, _SAVE_LISTS):
        archive = load_arrays(path)
        if isinstance(archive, np.lib.npyio.NpzFile):
            with archive:
                arrays = {name: archive[name] for name in (_COUNTS, _INDICES, _PARTIAL_COUNTS) if name in archive}
    missing = [name for name in (_COUNTS, _INDICES) if name not in arrays]
    if missing:
        raise InputError(f"{path} holds no {' and no '.join(missing)}.", hint=f"Write it with {_SAVE_LISTS}.")
    for name, array in arrays.items():
        _check_type(path, name, array)
    if _PARTIAL_COUNTS in arrays and arrays[_PARTIAL_COUNTS].any():
        raise InputError(
            f"{path}: {_PARTIAL_COUNTS} is not 0, so some blocks are partial: a function decides which of their "
            "pairs of tokens are attended to, and a list cannot.",
            hint=f"Choose a pattern of whole blocks, all listed in {_INDICES}.",
        )
    return arrays


def _without_batch(array: AnyArray, axes: int) -> AnyArray:
    return array[0] if array.ndim == axes + 1 and len(array) == 1 else array


def _check_shapes(path: Path, counts: AnyArray, indices: AnyArray, *, heads: int, blocks: int, sizes: str) -> None:
    rows = indices.shape[:2]
    if indices.ndim != 3 or not indices.size or rows not in ((1, blocks), (heads, blocks)) or counts.shape != rows:
        raise InputError(
            f"{path}: {_COUNTS} and {_INDICES} have the shapes {list(counts.shape)} and {list(indices.shape)}; they "
            f"must be [H, {blocks}] and [H, {blocks}, most], with 1 or {heads} for H: {sizes}.",
            hint=("Make the mask for a text of ", Setting("max_len"), " tokens and the block size of block=."),
        )


def _check_type(path: Path, name: str, array: AnyArray) -> None:
    if array.dtype.kind not in "iu":
        raise InputError(
            f"{path}: {name} is of type {array.dtype}; indices of blocks are integers.",
            hint="Write it as integers: array.astype(numpy.int32).",
        )


def _check_entries(path: Path, name: str, array: AnyArray, is_wrong: npt.NDArray[np.bool_], blocks: int) -> None:
    if is_wrong.any():
        place = tuple(map(int, np.argwhere(is_wrong)[0]))
        raise InputError(
            f"{path}: {name} lists block {array[place]} at {list(place)}; the longest text has the blocks 0 to "
            f"{blocks - 1}.",
            hint="Count blocks from 0, of the size given by block=.",
        )


def _blocks_of(max_tokens: int, block_size: int) -> int:
    return -(-max_tokens // block_size)


def _sizes(max_tokens: int, block_size: int) -> str:
    return f"{max_tokens} tokens are {_blocks_of(max_tokens, block_size)} blocks of {block_size}"
