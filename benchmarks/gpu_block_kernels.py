"""Block-sparse attention on an NVIDIA GPU: our kernels against FlexAttention, PyTorch's dense SDPA and the roofline.

Usage: python benchmarks/gpu_block_kernels.py [--tokens 512 1024 ...] [--head-dims 64 128] [--dtype DTYPE]
           [--output FILE]
       python benchmarks/gpu_block_kernels.py --compile    registers and spills of every kernel; needs no GPU

BigBird as it is published: blocks of 64, 3 random ones, which are all block 0 as Hugging Face evaluates it, or listed
in a table a head. It is timed as gpu_kernels.py times windows, and like there nothing is before the answers are right.
FlexAttention gets the same blocks as a BlockMask of full blocks, without a mask function on a GPU, and is spared that
block 0 counts several times.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_kernels
from hdexport.bench.measure.ceilings import measured_ceilings
from hdexport.bench.results.result import Ceilings
from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles
from hdplugins.operators.block_sparse_attention.geometry import kernel_sources, tiles_for_blocks, workspace_bytes
from hdplugins.operators.block_sparse_attention.pairs import pairs

BLOCK_SIZE, RANDOM_BLOCKS = 64, 3
COMPILED_BLOCK_SIZES = (16, 32, 64, 84, 128)

_ETC = {
    "block_size": BLOCK_SIZE, "first_global": 2, "last_global": 0, "window": 1, "first_repeats": 0, "dense_tokens": 0,
    "ends_by_row": 1,
}  # fmt: skip
_TABLE = _ETC | {"first_global": 1, "last_global": 1, "ends_by_row": 0}
_HF_EVAL = _TABLE | {"first_repeats": RANDOM_BLOCKS, "dense_tokens": (5 + 2 * RANDOM_BLOCKS) * BLOCK_SIZE}


def main() -> int:
    """Check, then time; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=gpu_kernels.DTYPES, default="float16")
    parser.add_argument("--total-tokens", type=int, default=65536, help="batch x tokens (default: 65536)")
    parser.add_argument("--compile", action="store_true", help="compile every kernel and print what it needs")
    parser.add_argument("--output", type=Path, help="append the results to this file, as JSON lines")
    options = parser.parse_args()
    context = gpu_kernels.about("gpu_block_kernels")
    if options.compile:
        return gpu_kernels.report(compiled_rows(), options.output, context)
    missing = gpu_kernels.why_no_gpu()
    if missing:
        print(f"no GPU: {missing}")
        return gpu_kernels.NO_GPU
    for problem in check_answers("cuda"):
        print(f"wrong answer: {problem}")
        return gpu_kernels.WRONG_ANSWERS
    print("answers are right in every dtype and head_dim", file=sys.stderr)
    ceilings = measured_ceilings("cuda", options.dtype)
    rows = timed_rows(
        options.tokens, options.head_dims, total_tokens=options.total_tokens, ceilings=ceilings, device="cuda"
    )
    return gpu_kernels.report(rows, options.output, context)


def check_answers(device: str, *, tiles: Tiles | None = None, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[str]:
    """What is wrong with the kernels on that device: a sentence for each case that fails.

    Args:
        device: "cuda", or "cpu" where Triton interprets.
        tiles: to check instead of the table's.
        head_dims: the sizes of a head to check.
    """
    from hdplugins.operators.block_sparse_attention.reference import block_sparse_attention

    for head_dim, dtype in itertools.product(head_dims, gpu_kernels.DTYPES):
        if device == "cpu" and dtype == "bfloat16":
            continue  # Triton's interpreter multiplies its bit patterns as integers
        for tokens, (name, attributes) in itertools.product(
            (1, 200, 1100), (("hf_eval", _HF_EVAL | {"dense_tokens": 70}), ("table", _TABLE), ("etc", _ETC))
        ):
            if device == "cpu" and tokens > 200:
                continue
            query, key, value = gpu_kernels.random_tensors(2, 3, tokens, head_dim, dtype, device)
            mask = _mask(2, tokens, device)
            mask[0, tokens - tokens // 4 :], mask[1, 1 :: max(2, tokens // 4)] = 0, 0
            table = _random_table(3, tokens, device) if name == "table" and tokens > 2 * BLOCK_SIZE else None
            given = {**attributes, "scale": head_dim**-0.5}
            actual = attention_call(query, key, value, mask, table, tiles=tiles, **given)()
            inputs = [tensor.cpu() for tensor in (query, key, value)]
            others = (mask.cpu(), None if table is None else table.cpu())
            right = block_sparse_attention(*(tensor.double() for tensor in inputs), *others, **given)
            problem = gpu_kernels.compare(actual.cpu(), right, block_sparse_attention(*inputs, *others, **given))
            if problem:
                yield f"{dtype} [2, 3, {tokens}, {head_dim}], {name}: {problem}"


def timed_rows(
    lengths: Sequence[int], head_dims: Sequence[int], *, total_tokens: int, ceilings: Ceilings, device: str
) -> Iterator[dict[str, Any]]:
    """The kernels and their peers at every length.

    Args:
        lengths: tokens of a text.
        head_dims: the sizes of a head.
        total_tokens: batch x tokens.
        ceilings: of the device, in the dtype that is timed.
        device: "cuda", or "cpu" where Triton interprets.
    """
    for head_dim, tokens in itertools.product(head_dims, lengths):
        shape = gpu_kernels.shape_of(head_dim, tokens, total_tokens, ceilings.dtype)
        table = _random_table(shape["heads"], tokens, device)
        # Dense where Hugging Face is, below 705 tokens; the table's are sparse at every length.
        for suffix, attributes, given in (("", _HF_EVAL, None), (", table", _TABLE, table)):
            listed = None if given is None else given.cpu().numpy()
            seen = pairs(tokens=tokens, heads=shape["heads"], **attributes, listed_blocks=listed)
            for case, make in ((f"bigbird{suffix}", _ours), (f"FlexAttention bigbird{suffix}", _flex)):
                yield gpu_kernels.timed_row(case, shape, seen, make(shape, device, attributes, given), ceilings)
        dense = shape["heads"] * tokens * tokens
        yield gpu_kernels.timed_row("torch SDPA dense", shape, dense, _sdpa(shape, device), ceilings)


def compiled_rows(
    *, block_sizes: Sequence[int] = COMPILED_BLOCK_SIZES, **of_kernels: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Registers and spills of `attend`; further arguments as of `gpu_kernels.compiled_rows`."""
    for block_size in block_sizes:
        sources_of = functools.partial(kernel_sources, block_size=block_size, has_table=True)
        yield from gpu_kernels.compiled_rows(sources_of, **of_kernels)


def attention_call(
    query: Any, key: Any, value: Any, token_mask: Any, table: Any, *, tiles: Tiles | None = None, **attributes: Any
) -> Callable[[], Any]:
    """A call of the kernels that allocates nothing; output and workspace hold NaN before the first.

    Args:
        query: [batch, heads, tokens, head_dim], on a GPU, or on the CPU where Triton interprets.
        key: [batch, heads, tokens, head_dim].
        value: [batch, heads, tokens, head_dim].
        token_mask: [batch, tokens], int32.
        table: [1 or heads, rows, listed], int32, or None.
        tiles: instead of the table's.
        attributes: of the operator, all of them.
    """
    import torch

    from hdplugins.operators.block_sparse_attention.triton_kernel import launch

    dtype, device = str(query.dtype).removeprefix("torch."), query.device
    of_gpu = tiles or tiles_for_blocks(
        gpu_kernels.architecture_of(device.type), query.shape[3], dtype, attributes["block_size"]
    )
    out = torch.full_like(query, torch.nan)
    sizes = workspace_bytes(query.shape, None if table is None else table.shape, **attributes)
    scratch = {name: torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for name, size in sizes.items()}

    def call() -> Any:
        launch(query, key, value, token_mask, table, out, **scratch, tiles=of_gpu, **attributes)
        return out

    return call


def seen_blocks(blocks: int, heads: int, attributes: dict[str, Any], table: Any | None, device: str) -> Any:
    """[1 or heads, blocks, blocks], bool: which blocks of keys each block of queries sees, in a text of that many."""
    import torch

    tokens = blocks * attributes["block_size"]
    block = torch.arange(blocks, device=device)
    is_global = (block < attributes["first_global"]) | ((block == blocks - 1) & bool(attributes["last_global"]))
    near = (block[:, None] - block).abs() <= attributes["window"]
    seen = (near | is_global | is_global[:, None] | (tokens <= attributes["dense_tokens"]))[None]
    if table is None:
        return seen
    seen = seen.expand(heads, -1, -1).clone()
    first, rows = attributes["first_global"], min(table.shape[1], blocks - attributes["first_global"])
    listed = torch.zeros(heads, rows, blocks, dtype=torch.bool, device=device)
    seen[:, first : first + rows] |= listed.scatter_(2, table[:, :rows].long(), True)
    return seen


def _ours(shape: dict[str, Any], device: str, attributes: dict[str, Any], table: Any) -> Callable[[], Any]:
    mask = _mask(shape["batch"], shape["tokens"], device)
    return attention_call(*_tensors(shape, device), mask, table, scale=shape["head_dim"] ** -0.5, **attributes)


def _flex(shape: dict[str, Any], device: str, attributes: dict[str, Any], table: Any) -> Callable[[], Any]:
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    query, key, value = _tensors(shape, device)
    seen = seen_blocks(-(-shape["tokens"] // BLOCK_SIZE), shape["heads"], attributes, table, device)

    def sees(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
        return seen[head % seen.shape[0], query_index // BLOCK_SIZE, key_index // BLOCK_SIZE]

    count, order = seen.sum(-1, dtype=torch.int32)[None], seen.int().argsort(dim=-1, descending=True, stable=True)[None]
    # No block is partial, so that a compiled kernel asks the function about none.
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(count), torch.zeros_like(order, dtype=torch.int32), count, order.int(),
        BLOCK_SIZE=BLOCK_SIZE, mask_mod=sees, seq_lengths=(shape["tokens"], shape["tokens"]),
    )  # fmt: skip
    gpu_kernels.allow_many_shapes()
    # A rehearsal does without the compiler, which takes half a minute a shape there.
    attention = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    return lambda: attention(query, key, value, block_mask=mask)


def _sdpa(shape: dict[str, Any], device: str) -> Callable[[], Any]:
    import torch

    query, key, value = _tensors(shape, device)
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)


def _tensors(shape: dict[str, Any], device: str) -> tuple[Any, Any, Any]:
    return gpu_kernels.random_tensors(
        shape["batch"], shape["heads"], shape["tokens"], shape["head_dim"], shape["dtype"], device
    )


def _mask(batch: int, tokens: int, device: str) -> Any:
    import torch

    return torch.ones(batch, tokens, dtype=torch.int32, device=device)


def _random_table(heads: int, tokens: int, device: str) -> Any:
    """[heads, blocks - 2, RANDOM_BLOCKS], int32: blocks but the first and the last; one row and block 1 at least."""
    import torch

    blocks = -(-tokens // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(blocks)
    size = (heads, max(1, blocks - 2), RANDOM_BLOCKS)
    return torch.randint(1, max(2, blocks - 1), size, generator=generator).int().to(device)


if __name__ == "__main__":
    sys.exit(main())
