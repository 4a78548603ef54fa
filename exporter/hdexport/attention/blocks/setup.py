"""From what was asked for to the block-sparse attention of a model: its description, tables and global tokens."""

from __future__ import annotations

__all__ = [
    "GLOBAL_EMBEDDINGS_FILE",
    "LISTED_BLOCKS_FILE",
    "BlockSetup",
    "bigbird",
    "block_setup",
    "checked_last_block",
    "read_setup",
    "write_setup",
]

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from hdexport.attention.blocks.random_tables import random_table, read_block_lists, read_table
from hdexport.attention.spec import DEFAULT_BLOCK_SIZE, DEFAULT_RANDOM_BLOCKS, BlockRequest, check_convertible
from hdexport.families import Family
from hdexport.support.array_files import load_arrays, reading
from hdruntime.bundle.manifest import BlockMode, BlockSparse, LastBlock
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError, InputError, ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

LISTED_BLOCKS_FILE = "listed_blocks.npy"
GLOBAL_EMBEDDINGS_FILE = "global_embeddings.npy"

LAST_BLOCKS: tuple[LastBlock, ...] = get_args(LastBlock)


@dataclass(frozen=True, kw_only=True)
class BlockSetup:
    """Block-sparse attention with all that it needs.

    Attributes:
        spec: what the manifest says of it.
        listed_blocks: [layers, 1 or heads, rows, listed], int32, the operator's table of each layer, or None.
        global_embeddings: [global tokens, width], float32, what the layers are given for ETC's global tokens, or None.
    """

    spec: BlockSparse
    listed_blocks: npt.NDArray[np.int32] | None = None
    global_embeddings: npt.NDArray[np.float32] | None = None

    def tables(self, layers: int) -> list[torch.Tensor | None]:
        """The table of each layer, as a tensor.

        Raises:
            BundleCorruptError: there is one for another number of layers.
        """
        import torch

        if self.listed_blocks is None:
            return [None] * layers
        if len(self.listed_blocks) != layers:
            raise BundleCorruptError(
                f"{LISTED_BLOCKS_FILE} has tables of {len(self.listed_blocks)} layers, and the model has {layers}.\n"
                "Rebuild or copy the bundle again."
            )
        return [torch.from_numpy(table) for table in self.listed_blocks]


def block_setup(
    request: BlockRequest | None,
    model: PreTrainedModel,
    family: Family,
    *,
    max_len: int,
    last_block: LastBlock | None = None,
    global_embeddings: Path | None = None,
    first_special_id: Callable[[], int | None] = lambda: None,
) -> BlockSetup | None:
    """The block-sparse attention that a model has, or gets; None where it has none and none was asked for.

    Args:
        request: what was asked for, if anything was.
        model: with `max_len` positions, in float32.
        family: of the model.
        max_len: the longest input, in tokens.
        last_block: ``padded`` or ``row``, for BigBird; None for ``padded``.
        global_embeddings: a .npy file for ETC; None computes them from ids.
        first_special_id: the id that a text begins with; None where it is unknown.

    Raises:
        ModelError: the model cannot be given it.
        InputError: an option does not fit the others, the model, or the file it names.
    """
    own = family.block_sparse(model.config) if family.block_sparse is not None else None
    if request is not None:
        _check_model(request, own, model, family)
    spec = _spec(request, own, last_block)
    _check_options(spec, last_block, global_embeddings)
    if spec is None:
        return None
    if spec.dense_tokens >= max_len:
        logger.warning(
            "Texts of up to %d tokens are attended to densely, which is all of up to %d.", spec.dense_tokens, max_len
        )
    heads = int(model.config.num_attention_heads)
    tables = _tables(request, spec, heads=heads, layers=_layers(model, own), max_len=max_len)
    embeddings = None
    if request is not None and spec.kind == "etc":
        if spec.global_tokens > max_len:
            raise InputError(
                f"--attention asks for {spec.global_tokens} global tokens; there are {max_len} positions for them.\n"
                f"Ask for {max_len} or fewer, or build with a larger --max-len."
            )
        embeddings = _global_embeddings(request, model, global_embeddings, first_special_id)
    return BlockSetup(spec=spec, listed_blocks=tables, global_embeddings=embeddings)


def bigbird(
    *, block_size: int, random_blocks: int, mode: BlockMode = "hf_eval", last_block: LastBlock = "padded"
) -> BlockSparse:
    """BigBird's attention, by default as Hugging Face evaluates it.

    Its rule for what is attended to densely: texts that are no longer than the two global blocks, the three of the
    window, and twice the random ones.

    Args:
        block_size: tokens of a block.
        random_blocks: random blocks of each row of blocks.
        mode: ``hf_eval`` or ``table``.
        last_block: ``padded`` or ``row``.
    """
    return BlockSparse(
        kind="bigbird",
        block_size=block_size,
        mode=mode,
        random_blocks=random_blocks,
        global_tokens=0,
        last_block=last_block,
        dense_tokens=(5 + 2 * random_blocks) * block_size,
    )


def checked_last_block(policy: str | None) -> LastBlock | None:
    """The value of ``--bigbird-last-block``, if it was given.

    Raises:
        InputError: it is none.
    """
    known = next((known for known in LAST_BLOCKS if known == policy), None)
    if known != policy:
        raise InputError(f"--bigbird-last-block {policy} is unknown.\nChoose one of: {', '.join(LAST_BLOCKS)}.")
    return known


def write_setup(setup: BlockSetup, directory: Path) -> None:
    """Write the tables and embeddings beside the graphs, for whoever compares the bundle with PyTorch."""
    if setup.listed_blocks is not None:
        np.save(directory / LISTED_BLOCKS_FILE, setup.listed_blocks, allow_pickle=False)
    if setup.global_embeddings is not None:
        np.save(directory / GLOBAL_EMBEDDINGS_FILE, setup.global_embeddings, allow_pickle=False)


def read_setup(bundle: Bundle) -> BlockSetup | None:
    """The block-sparse attention of a bundle; None where it has none.

    Raises:
        BundleCorruptError: a file that it needs is missing or damaged, or holds something else than the manifest says.
    """
    spec, manifest = bundle.manifest.block_sparse, bundle.manifest
    if spec is None:
        return None
    tables = embeddings = None
    if spec.mode in ("table", "lists"):
        tables = _array_of_bundle(bundle, LISTED_BLOCKS_FILE, "int32", axes=4)
        blocks = -(-manifest.max_len // spec.block_size)
        # BigBird's first and last block see all, and have no row.
        rows = blocks - 2 if spec.kind == "bigbird" else blocks
        heads = tables.shape[1]
        if (
            heads not in (1, manifest.num_heads)
            or tables.shape[2] != rows
            or tables.min() < -1
            or tables.max() >= blocks
        ):
            raise _contradicts(
                bundle,
                LISTED_BLOCKS_FILE,
                f"{list(tables.shape)} of blocks {tables.min()} to {tables.max()}",
                f"[layers, 1 or {manifest.num_heads}, {rows}, listed] of blocks -1 to {blocks - 1}",
            )
    if spec.kind == "etc":
        embeddings = _array_of_bundle(bundle, GLOBAL_EMBEDDINGS_FILE, "float32", axes=2)
        if len(embeddings) != spec.global_tokens or not np.isfinite(embeddings).all():
            found = f"{len(embeddings)} rows" if np.isfinite(embeddings).all() else "NaN or infinity"
            raise _contradicts(bundle, GLOBAL_EMBEDDINGS_FILE, found, f"{spec.global_tokens} finite rows")
    return BlockSetup(spec=spec, listed_blocks=tables, global_embeddings=embeddings)


def _array_of_bundle(bundle: Bundle, name: str, dtype: str, *, axes: int) -> npt.NDArray[Any]:
    path = bundle.file(name)
    try:
        # A copy of what is mapped: see `load_arrays`.
        values = np.array(load_arrays(path))
    except Exception as error:  # what NumPy raises of damaged files has no class in common
        raise BundleCorruptError(
            f"The file {name} of the bundle {bundle.path} cannot be read: {error}.\nRebuild or copy the bundle again."
        ) from error
    if values.dtype != dtype or values.ndim != axes or not values.size:
        raise _contradicts(bundle, name, f"{values.dtype} {list(values.shape)}", f"{dtype} of {axes} axes")
    return values


def _contradicts(bundle: Bundle, name: str, found: str, expected: str) -> BundleCorruptError:
    return BundleCorruptError(
        f"The file {name} of the bundle {bundle.path} holds {found}; its manifest wants {expected}.\n"
        "Rebuild or copy the bundle again."
    )


def _check_model(request: BlockRequest, own: BlockSparse | None, model: PreTrainedModel, family: Family) -> None:
    model_type = model.config.model_type
    if family.block_sparse is None:
        check_convertible(family, model_type=model_type, to="block-sparse")
        return
    if own is None:
        raise ModelError(
            f"The checkpoint's attention_type is original_full: {model_type} trained densely.\n"
            'Leave out --attention, or set "attention_type": "block_sparse" in config.json.'
        )
    if request.kind != "bigbird":
        raise ModelError(
            f"{model_type} has block-sparse attention of its own.\n"
            "Leave out --attention, or choose its random blocks: --attention bigbird:mode=table"
        )
    for name, asked, has in (
        ("block", request.block_size, own.block_size),
        ("random", request.random_blocks, own.random_blocks),
    ):
        if asked not in (None, has):
            raise InputError(f"--attention asks for {name}={asked}, and the checkpoint has {has}.\nLeave it out.")


def _spec(request: BlockRequest | None, own: BlockSparse | None, last_block: LastBlock | None) -> BlockSparse | None:
    last_block = last_block or LAST_BLOCKS[0]
    if own is not None:
        mode = request.mode if request is not None else None
        return dataclasses.replace(own, mode=mode or own.mode, last_block=last_block)
    if request is None:
        return None
    block_size = request.block_size or DEFAULT_BLOCK_SIZE
    if request.kind == "bigbird":
        return bigbird(
            block_size=block_size,
            random_blocks=DEFAULT_RANDOM_BLOCKS if request.random_blocks is None else request.random_blocks,
            mode=request.mode or "hf_eval",
            last_block=last_block,
        )
    return BlockSparse(
        kind=request.kind,
        block_size=block_size,
        mode="lists" if request.kind == "blocks" else "none",
        random_blocks=0,
        global_tokens=request.global_tokens,
        # No block of these depends on where a text ends, only on where it begins.
        last_block="row",
        dense_tokens=0,
    )


def _check_options(spec: BlockSparse | None, last_block: str | None, global_embeddings: Path | None) -> None:
    if last_block is not None and (spec is None or spec.kind != "bigbird"):
        raise InputError(
            f"--bigbird-last-block {last_block} is for BigBird's attention, which this model has not.\nLeave it out."
        )
    if global_embeddings is not None and (spec is None or spec.kind != "etc"):
        raise InputError(
            f"--global-embeddings {global_embeddings} is for the global tokens of --attention etc:global=G.\n"
            "Leave it out, or add that."
        )


def _layers(model: PreTrainedModel, own: BlockSparse | None) -> int:
    """Attentions with weights of their own."""
    from hdexport.attention.model_parts import attention_modules

    return int(model.config.num_hidden_layers) if own is not None else len(attention_modules(model))


def _tables(
    request: BlockRequest | None, spec: BlockSparse, *, heads: int, layers: int, max_len: int
) -> npt.NDArray[np.int32] | None:
    if request is None or spec.mode not in ("table", "lists"):
        return None
    sizes = {"heads": heads, "max_tokens": max_len, "block_size": spec.block_size}
    if spec.mode == "lists":
        assert request.file is not None
        return np.stack([read_block_lists(request.file, **sizes)] * layers)
    if request.file is not None:
        tables = np.stack(read_table(request.file, **sizes, layers=layers))
        if tables.shape[-1] != spec.random_blocks:
            raise InputError(
                f"{request.file} lists {tables.shape[-1]} random blocks a row; {spec.random_blocks} were asked for.\n"
                f"Say random={tables.shape[-1]}, or give a table of {spec.random_blocks}."
            )
        return tables
    seed = request.seed or 0
    drawn = [random_table(**sizes, random_blocks=spec.random_blocks, seed=seed + layer) for layer in range(layers)]
    return np.stack(drawn)


def _global_embeddings(
    request: BlockRequest, model: PreTrainedModel, file: Path | None, first_special_id: Callable[[], int | None]
) -> npt.NDArray[np.float32]:
    """[global tokens, width]: those of a file, or what the model's own embeddings give ids at positions 0, 1, ..."""
    import torch

    from hdexport.attention.model_parts import states_before_layers

    count = request.global_tokens
    if file is not None:
        width = states_before_layers(model, torch.zeros(1, dtype=torch.int64)).shape[1]
        return _read_embeddings(file, (count, width))
    special = None if request.global_ids else first_special_id()
    given = request.global_ids if special is None else (special,)
    if not given:
        raise InputError(
            "The checkpoint does not say which token begins a text, so its global tokens have no embedding.\n"
            "Name an id: --attention etc:global=G,tokens=101, or give --global-embeddings FILE.npy."
        )
    if max(given) >= model.config.vocab_size:
        raise InputError(
            f"--attention has the id {max(given)}; the vocabulary has {model.config.vocab_size} ids, from 0.\n"
            "Name ids of the model's own tokenizer."
        )
    embedded: npt.NDArray[np.float32] = states_before_layers(model, torch.tensor(given * (count // len(given)))).numpy()
    return embedded


def _read_embeddings(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    with reading(file, "numpy.save(file, rows)", option="--global-embeddings "):
        values = load_arrays(file)
    if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype.kind != "f":
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else "an archive"
        raise InputError(
            f"--global-embeddings {file} holds {found}; this model takes float32 {list(shape)}: "
            "[global tokens, width], what its layers are given for each global token."
        )
    if not np.isfinite(values).all():
        raise InputError(f"--global-embeddings {file} holds NaN or infinity.\nTrain, or write, it again.")
    return values.astype(np.float32)
