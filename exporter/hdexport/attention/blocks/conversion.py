"""Block-sparse attention of a model, with the tables of blocks and the global embeddings that it needs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.attention.attention_type import NOT_TRAINED, AttentionConversion, ConversionContext
from hdexport.attention.blocks import (
    GLOBAL_EMBEDDINGS_FILE,
    LISTED_BLOCKS_FILE,
    BlockRequest,
    BlockSparse,
    LastBlock,
    Mode,
    Pattern,
)
from hdexport.attention.blocks.random_tables import load_arrays, random_table, read_block_lists, read_table, reading
from hdexport.model.family import Family
from hdruntime.arrays import AnyArray, FloatArray
from hdruntime.bundle.manifest import PaddingRule
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError, InputError, ModelError, Setting

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_DEFAULT_BLOCK_SIZE, _DEFAULT_RANDOM_BLOCKS = 64, 3
"""BigBird's; blocks are measured in tokens."""


@dataclass(frozen=True, kw_only=True)
class BlockConversion(AttentionConversion):
    """Block-sparse attention with all that it needs.

    Attributes:
        listed_blocks: [layers, 1 or heads, rows, listed], int32, the operator's table of each layer, or None.
        global_embeddings: [global tokens, width], float32, the layers' inputs for ETC's global tokens, or None.
    """

    record: BlockSparse
    listed_blocks: npt.NDArray[np.int32] | None = None
    global_embeddings: FloatArray | None = None

    @property
    def ordinary_keys(self) -> int:
        """Tokens of a text that a query of an ordinary block sees, at most, where the text is not attended to densely.

        Random blocks are counted as if they were no others. Among lists, the one with a middling number is ordinary.
        """
        if self.record.pattern is Pattern.BLOCKS:
            assert self.listed_blocks is not None
            blocks = int(np.median((self.listed_blocks >= 0).sum(-1)))
        else:
            blocks = 5 if self.record.pattern is Pattern.BIGBIRD else 3
            blocks += self.record.random_blocks if self.record.mode is Mode.TABLE else 0
        return blocks * self.record.block_size

    @property
    def most_keys(self) -> int:
        """The most tokens of a text that a query of an ordinary block sees."""
        return max(self.ordinary_keys, self.record.dense_tokens)

    def tables(self, layers: int) -> list[torch.Tensor | None]:
        """The table of each layer, as a tensor; a BundleCorruptError rejects tables of another number of layers."""
        import torch

        if self.listed_blocks is None:
            return [None] * layers
        if len(self.listed_blocks) != layers:
            raise BundleCorruptError(
                f"{LISTED_BLOCKS_FILE} has tables of {len(self.listed_blocks)} layers, and the model has {layers}.",
                hint="Rebuild or copy the bundle again.",
            )
        return [torch.from_numpy(table) for table in self.listed_blocks]

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        if self.is_native:
            super().adapt(model, family)
        else:
            _wrap_in_blocks(model, self)

    def write(self, directory: Path) -> None:
        """Write the tables and embeddings next to the graphs, for comparing the bundle with PyTorch."""
        if self.listed_blocks is not None:
            np.save(directory / LISTED_BLOCKS_FILE, self.listed_blocks, allow_pickle=False)
        if self.global_embeddings is not None:
            np.save(directory / GLOBAL_EMBEDDINGS_FILE, self.global_embeddings, allow_pickle=False)


def block_conversion(request: BlockRequest | None, context: ConversionContext) -> BlockConversion | None:
    """The block-sparse attention that a model has, or gets; None where it has none and none was requested.

    A ModelError says that the model cannot be given it; an InputError, that an option does not fit the others, the
    model, or the file that it names.
    """
    request, model, max_len = request or BlockRequest(), context.model, context.max_len
    own = context.family.native_record("blocks", model.config)
    if request.pattern is not None:
        if context.family.native_attention is not None and context.family.native_attention.attention_type == "blocks":
            _check_own(request, own, model.config.model_type)
        else:
            context.check_convertible(to="block-sparse")
            _check_positions(request, context)
    spec = _spec(request, own)
    _check_options(spec, request)
    if spec is None:
        return None
    if spec.dense_tokens >= max_len:
        logger.warning(
            "Attention is dense up to %d tokens, which covers every text of up to %d.", spec.dense_tokens, max_len
        )
    heads = int(model.config.num_attention_heads)
    tables = _tables(request, spec, heads=heads, layers=_layers(model, own), max_len=max_len)
    embeddings = None
    if spec.pattern is Pattern.ETC:
        if spec.global_tokens > max_len:
            raise InputError(
                Setting("attention"),
                f" has {spec.global_tokens} global tokens, and there are {max_len} positions for them.",
                hint=(f"Use {max_len} or fewer, or a larger ", Setting("max_len"), "."),
            )
        embeddings = _global_embeddings(request, model, context.first_special_id)
    conversion = dataclasses.replace(_conversion(spec, tables, embeddings), query_scale=context.query_scale)
    if spec.converted:
        context.warn_if_unscaled(conversion.most_keys)
    return conversion


def _conversion(
    spec: BlockSparse, tables: npt.NDArray[np.int32] | None, embeddings: FloatArray | None
) -> BlockConversion:
    padding = note = None
    if spec.last_block is LastBlock.PADDED:
        # The end of a text's last block stays the last; in a dense text that block is as any other.
        padding = PaddingRule(multiple_of=spec.block_size, free_up_to=spec.dense_tokens)
    if spec.converted:
        note = f"Attention is cut to blocks of {spec.block_size} tokens, {NOT_TRAINED.format('blocks')}"
    return BlockConversion(
        is_native=not spec.converted,
        padding=padding,
        note=note,
        record=spec,
        listed_blocks=tables,
        global_embeddings=embeddings,
    )


def bigbird(
    *,
    block_size: int,
    random_blocks: int,
    mode: Mode = Mode.HF_EVAL,
    last_block: LastBlock = LastBlock.PADDED,
    converted: bool = False,
) -> BlockSparse:
    """BigBird's attention, by default as Hugging Face evaluates it.

    Its rule for dense attention: texts that are no longer than the two global blocks, the three of the window, and
    twice the random ones.
    """
    return BlockSparse(
        pattern=Pattern.BIGBIRD,
        block_size=block_size,
        mode=mode,
        random_blocks=random_blocks,
        global_tokens=0,
        last_block=last_block,
        dense_tokens=(5 + 2 * random_blocks) * block_size,
        converted=converted,
    )


def read_conversion(spec: BlockSparse, bundle: Bundle) -> BlockConversion:
    """The block-sparse attention of a bundle; a BundleCorruptError names a file that is missing, damaged, or of other
    content than the manifest says.
    """
    manifest = bundle.manifest
    tables = embeddings = None
    if spec.mode in (Mode.TABLE, Mode.LISTS):
        tables = _array_of_bundle(bundle, LISTED_BLOCKS_FILE, "int32", axes=4)
        blocks = -(-manifest.max_len // spec.block_size)
        # BigBird's first and last block see all, and have no row.
        rows = blocks - 2 if spec.pattern is Pattern.BIGBIRD else blocks
        fits = tables.shape[1] in (1, manifest.num_heads) and tables.shape[2] == rows
        if not fits or tables.min() < -1 or tables.max() >= blocks:
            raise _contradicts(
                bundle,
                LISTED_BLOCKS_FILE,
                f"{list(tables.shape)} of blocks {tables.min()} to {tables.max()}",
                f"[layers, 1 or {manifest.num_heads}, {rows}, listed] of blocks -1 to {blocks - 1}",
            )
    if spec.pattern is Pattern.ETC:
        embeddings = _array_of_bundle(bundle, GLOBAL_EMBEDDINGS_FILE, "float32", axes=2)
        if len(embeddings) != spec.global_tokens or not np.isfinite(embeddings).all():
            held = f"{len(embeddings)} rows" if np.isfinite(embeddings).all() else "NaN or infinity"
            raise _contradicts(bundle, GLOBAL_EMBEDDINGS_FILE, held, f"{spec.global_tokens} finite rows")
    return _conversion(spec, tables, embeddings)


def _wrap_in_blocks(model: PreTrainedModel, conversion: BlockConversion) -> None:
    """Give each attention its table, and the stack of layers the order of tokens that blocks count."""
    import torch

    from hdexport.attention.blocks.model import BlockMask, block_query_factors, give_tables, through_blocks
    from hdexport.attention.model_parts import Layers, wrap_layers

    give_tables(model, conversion.tables)
    spec, query_scale, global_embeddings = conversion.record, conversion.query_scale, None
    if conversion.global_embeddings is not None:
        # A parameter of the model, so that it is a weight of the graph.
        global_embeddings = torch.nn.Parameter(torch.from_numpy(conversion.global_embeddings).to(model.dtype))
        model.register_parameter("global_embeddings", global_embeddings)

    def around(hidden_states: torch.Tensor, attention_mask: torch.Tensor, layers: Layers) -> torch.Tensor:
        factors = None
        if query_scale is not None and query_scale.changes(conversion.most_keys):
            factors = block_query_factors(spec, query_scale, attention_mask, conversion.ordinary_keys)

        def masked(states: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
            return layers(states, BlockMask(spec, token_mask, factors))

        return through_blocks(spec, hidden_states, attention_mask, masked, global_embeddings)

    wrap_layers(model, around)


def _array_of_bundle(bundle: Bundle, name: str, dtype: str, *, axes: int) -> AnyArray:
    path = bundle.file(name)
    try:
        # A copy of mapped arrays: see `load_arrays`.
        values = np.array(load_arrays(path))
    except Exception as error:  # NumPy's errors for damaged files have no class in common
        raise BundleCorruptError(
            f"The file {name} of the bundle {bundle.path} cannot be read: {error}.",
            hint="Rebuild or copy the bundle again.",
        ) from error
    if values.dtype != dtype or values.ndim != axes or not values.size:
        raise _contradicts(bundle, name, f"{values.dtype} {list(values.shape)}", f"{dtype} of {axes} axes")
    return values


def _contradicts(bundle: Bundle, name: str, found: str, expected: str) -> BundleCorruptError:
    return BundleCorruptError(
        f"The file {name} of the bundle {bundle.path} holds {found}; its manifest wants {expected}.",
        hint="Rebuild or copy the bundle again.",
    )


def _check_own(request: BlockRequest, own: BlockSparse | None, model_type: str) -> None:
    """Reject a pattern that a BigBird's own attention cannot get; `own` is None where this checkpoint is dense."""
    if own is None:
        raise ModelError(
            f"The checkpoint's attention_type is original_full: {model_type} trained densely.",
            hint=("Leave out ", Setting("attention"), ', or set "attention_type": "block_sparse" in config.json.'),
        )
    if request.pattern is not Pattern.BIGBIRD:
        raise ModelError(
            f"{model_type} has block-sparse attention of its own.",
            hint=(
                "Leave out ",
                Setting("attention"),
                ", or choose its random blocks: ",
                Setting("attention", "bigbird:mode=table"),
            ),
        )
    sizes = {"block": (request.block_size, own.block_size), "random": (request.random_blocks, own.random_blocks)}
    for name, (requested, trained) in sizes.items():
        if requested not in (None, trained):
            raise InputError(
                Setting("attention"),
                f" has {name}={requested}, and the checkpoint has {trained}.",
                hint="Leave it out.",
            )


def _spec(request: BlockRequest, own: BlockSparse | None) -> BlockSparse | None:
    last_block = request.last_block or LastBlock.PADDED
    if own is not None:
        return dataclasses.replace(own, mode=request.mode or own.mode, last_block=last_block)
    if request.pattern is None:
        return None
    block_size = request.block_size or _DEFAULT_BLOCK_SIZE
    if request.pattern is Pattern.BIGBIRD:
        return bigbird(
            block_size=block_size,
            random_blocks=_DEFAULT_RANDOM_BLOCKS if request.random_blocks is None else request.random_blocks,
            mode=request.mode or Mode.HF_EVAL,
            last_block=last_block,
            converted=True,
        )
    return BlockSparse(
        pattern=request.pattern,
        block_size=block_size,
        mode=Mode.LISTS if request.pattern is Pattern.BLOCKS else Mode.NONE,
        random_blocks=0,
        global_tokens=request.global_tokens,
        # No block of these depends on where a text ends, only on where it begins.
        last_block=LastBlock.ROW,
        dense_tokens=0,
        converted=True,
    )


def _check_options(spec: BlockSparse | None, request: BlockRequest) -> None:
    if request.last_block is not None and (spec is None or spec.pattern is not Pattern.BIGBIRD):
        raise InputError(
            Setting("bigbird_last_block", request.last_block),
            " is for BigBird's attention, and this model has another.",
            hint="Leave it out.",
        )
    if request.global_embeddings is not None and (spec is None or spec.pattern is not Pattern.ETC):
        raise InputError(
            Setting("global_embeddings", str(request.global_embeddings)),
            " is for the global tokens of ",
            Setting("attention", "etc:global=G"),
            ".",
            hint=("Leave it out, or add ", Setting("attention", "etc:global=G"), "."),
        )


def _check_positions(request: BlockRequest, context: ConversionContext) -> None:
    """Tokens in front have embeddings of positions of their own, and would move the text among computed ones."""
    if request.pattern is Pattern.ETC and not context.family.learned_positions:
        raise ModelError(
            Setting("attention", "etc"),
            f" puts global tokens in front of a text. This {context.model.config.model_type} computes positions, "
            "rotary or relative, which such tokens do not have.",
            hint=(
                "Use ",
                Setting("attention", "window:256,global:1"),
                " or ",
                Setting("attention", "bigbird:block=64,random=3"),
                ".",
            ),
        )


def _layers(model: PreTrainedModel, own: BlockSparse | None) -> int:
    """Attentions with weights of their own."""
    from hdexport.attention.model_parts import attention_modules

    return int(model.config.num_hidden_layers) if own is not None else len(attention_modules(model))


def _tables(
    request: BlockRequest, spec: BlockSparse, *, heads: int, layers: int, max_len: int
) -> npt.NDArray[np.int32] | None:
    if spec.mode not in (Mode.TABLE, Mode.LISTS):
        return None
    sizes = {"heads": heads, "max_tokens": max_len, "block_size": spec.block_size}
    if spec.mode is Mode.LISTS:
        assert request.file is not None
        return np.stack([read_block_lists(request.file, **sizes)] * layers)
    if request.file is not None:
        tables = np.stack(read_table(request.file, **sizes, layers=layers))
        if tables.shape[-1] != spec.random_blocks:
            raise InputError(
                f"{request.file} lists {tables.shape[-1]} random blocks per row; {spec.random_blocks} were requested.",
                hint=f"Set random={tables.shape[-1]}, or give a table of {spec.random_blocks}.",
            )
        return tables
    seed = request.seed or 0
    drawn = [random_table(**sizes, random_blocks=spec.random_blocks, seed=seed + layer) for layer in range(layers)]
    return np.stack(drawn)


def _global_embeddings(
    request: BlockRequest, model: PreTrainedModel, first_special_id: Callable[[], int | None]
) -> FloatArray:
    """[global tokens, width]: a file's, or the model's own embeddings of ids at positions 0, 1, ..."""
    import torch

    from hdexport.attention.model_parts import states_before_layers

    count, file = request.global_tokens, request.global_embeddings
    if file is not None:
        width = states_before_layers(model, torch.zeros(1, dtype=torch.int64)).shape[1]
        return _read_embeddings(file, (count, width))
    special = None if request.global_ids else first_special_id()
    ids = request.global_ids if special is None else (special,)
    if not ids:
        raise InputError(
            "The checkpoint does not say which token begins a text, so its global tokens have no embedding.",
            hint=(
                "Name an id, ",
                Setting("attention", "etc:global=G,tokens=101"),
                ", or a file, ",
                Setting("global_embeddings"),
                ".",
            ),
        )
    if max(ids) >= model.config.vocab_size:
        raise InputError(
            Setting("attention"),
            f" has the id {max(ids)}; ids of the vocabulary are 0 to {model.config.vocab_size - 1}.",
            hint="Use ids of the model's tokenizer.",
        )
    embedded: FloatArray = states_before_layers(model, torch.tensor(ids * (count // len(ids)))).numpy()
    if not np.isfinite(embedded).all():
        # An ESM divides by the tokens that are no masks.
        raise InputError(
            f"The model's embeddings of a text of the ids {', '.join(map(str, ids))} alone are NaN or infinite.",
            hint=(
                "Name another id, ",
                Setting("attention", "etc:global=G,tokens=ID"),
                ", or a file, ",
                Setting("global_embeddings"),
                ".",
            ),
        )
    return embedded


def _read_embeddings(file: Path, shape: tuple[int, ...]) -> FloatArray:
    with reading(file, "numpy.save(file, rows)"):
        values = load_arrays(file)
    if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype.kind != "f":
        content = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else "an archive"
        raise InputError(
            Setting("global_embeddings", str(file)),
            f" holds {content}; this model takes float32 {list(shape)}: [global tokens, width], the input of its "
            "layers for each global token.",
            hint="Write such an array: numpy.save(file, rows).",
        )
    if not np.isfinite(values).all():
        raise InputError(
            Setting("global_embeddings", str(file)), " holds NaN or infinity.", hint="Train or write the file again."
        )
    return values.astype(np.float32)
