"""Cases for the kernels and plugins of every sparse operator, and cases particular to each."""

from __future__ import annotations

__all__ = [
    "BLOCK_MODES",
    "KERNELS",
    "KernelDescription",
    "answer_of_gpu",
    "block_mask",
    "chunk_mask",
    "inputs_of",
    "right_answers",
    "row_of_kinds",
]

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hdplugins import Operator
from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles
from hdplugins.operators.block_sparse_attention.tiles import tiles_for_blocks
from hdplugins.operators.chunk_attention.tiles import tiles_for_chunks
from hdplugins.operators.kernel_launch import launch
from hdplugins.operators.plugin_face import face_of
from hdplugins.operators.sliding_window_attention.tiles import WINDOW_HEAD_DIMS, tiles_for_windows
from support.block_operator import Blocks
from support.chunk_operator import Chunks
from support.interpreted_kernel import Inputs
from support.lsh_operator import Lsh
from support.sparse_operators import PADDINGS, SparseLayer, Window, token_kinds

_DTYPES = ("float32", "float16")
"""Types without bfloat16: Triton 3.9's interpreter multiplies its bit patterns as integers."""


@dataclass(frozen=True, kw_only=True)
class KernelDescription:
    """The kernel of one operator, for tests of all kernels and plugins."""

    tiles: Tiles  # small ones: short texts then have blocks of every sort, at the edges and between them
    cases: Sequence[Any]  # layer, kinds, tiles and size of the queries, whose answers must be right
    every_run: Sequence[str]  # names of cases that every run tries, for the interpreter is slow; others are nightly
    # a node, tokens, the first key that holds NaN, the end of the queries that must not see it, and the first of
    # the queries that do; None where hashes decide which keys are seen
    not_loaded: tuple[SparseLayer, int, int, int, int] | None
    fitting: SparseLayer  # a node with twelve heads of 64 that kernels can be launched for
    # attributes, and the shape of a query or of the last input -> the message that refuses a launch
    refused: Sequence[tuple[dict[str, Any], str]]
    # attributes -> the message that refuses to compile, beside what no attention kernel is for
    uncompiled: Sequence[tuple[dict[str, Any], str]]


def inputs_of(layer: SparseLayer, kinds: torch.Tensor, *, size: float = 1.0) -> Inputs:
    """Random states; a query of padding is NaN, since its answer is 0 with any content of padding."""
    (batch, tokens), names = kinds.shape, layer.operator.state_names
    shapes = [(batch, layer.heads_of(name), tokens, layer.head_dim) for name in names]
    generator = torch.Generator().manual_seed(math.prod(shapes[0]))
    dtype = getattr(torch, layer.dtype)
    query, *others = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    query = (layer.decided(query) * size).masked_fill((kinds == 0)[:, None, :, None], torch.nan)
    typed = (query, *others)
    states = dict(zip(names, typed, strict=True))
    tables = map(torch.from_numpy, layer.constants.values())
    return states | dict(zip(layer.operator.inputs[len(names) :], (kinds, *tables), strict=False))


def right_answers(
    layer: SparseLayer, inputs: Inputs, dtype: torch.dtype = torch.float64, **changes: Any
) -> torch.Tensor:
    """The answer by the definition."""
    states = [inputs[name].nan_to_num().to(dtype) for name in layer.operator.state_names]
    return layer.by_definition(states, inputs, **changes)


def answer_of_gpu(operator: Operator, inputs: Inputs, attributes: Mapping[str, Any]) -> torch.Tensor:
    """The kernels' results on the machine's GPU, with its tiles; skips a test where PyTorch has no CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    on_gpu, face = [tensor.cuda() for tensor in inputs.values()], face_of(operator)
    shapes, dtype = [tuple(tensor.shape) for tensor in on_gpu], str(on_gpu[0].dtype).removeprefix("torch.")
    sizes = face.workspace(shapes, attributes)
    scratch = {name: torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for name, size in sizes.items()}
    major, minor = torch.cuda.get_device_capability()
    tiles = face.tiles(shapes, attributes, dtype=dtype, architecture=10 * major + minor)
    out = torch.full_like(on_gpu[0], torch.nan)
    launch(operator, on_gpu, out, scratch, tiles=tiles, attributes=attributes)
    return out.cpu()


def _case(
    *name: object,
    layer: SparseLayer,
    kinds: torch.Tensor,
    tiles: Tiles | None = None,
    size: float = 1.0,
) -> Any:
    """A call of a kernel: mask or kinds of tokens, [batch, tokens], and tiles, None for small ones."""
    return pytest.param(layer, kinds, tiles, size, id=" ".join(str(part) for part in name if part != ""))


def row_of_kinds(tokens: int, globals_: Sequence[int] = (), padding: Sequence[int] = ()) -> torch.Tensor:
    """[1, tokens]"""
    row = torch.ones(1, tokens, dtype=torch.int32)
    row[0, list(globals_)] = 2
    row[0, list(padding)] = 0
    return row


def _globals(kind: str, tokens: int) -> Sequence[int]:
    some = {0, 3, tokens // 2, tokens // 2 + 1, max(0, tokens - 5)} & set(range(tokens))
    return {"none": [], "first": [0], "scattered": sorted(some), "all": range(tokens)}[kind]


def _padding(kind: str, tokens: int) -> Sequence[int]:
    third, fifth = tokens // 3, tokens // 5
    return {
        "none": [],
        "right": range(tokens - third, tokens),
        "left": range(third),
        "both sides and a hole": [*range(fifth), tokens // 2, *range(tokens - fifth, tokens)],
        "all": range(tokens),
    }[kind]


def _window_cases() -> list[Any]:
    def case(*name: object, kinds: torch.Tensor, size: float = 1.0, tiles: Tiles | None = None, **layer: Any) -> None:
        window = Window(**{"left": 16, "right": 16, "heads": 1, "bound": int((kinds == 2).sum(1).max()), **layer})
        cases.append(_case(*name, layer=window, kinds=kinds, size=size, tiles=tiles))

    cases: list[Any] = []
    for globals_, tokens in itertools.product(("none", "first", "scattered", "all"), (1, 15, 16, 17, 32, 33, 61, 131)):
        case("globals", globals_, tokens, kinds=row_of_kinds(tokens, _globals(globals_, tokens)))
    for left, right in ((0, 0), (1, 1), (64, 64), (500, 500), (16, 3), (0, 16), (40, 0), (2**31, 2**40)):
        for globals_ in ("none", "scattered"):
            kinds = row_of_kinds(131, _globals(globals_, 131))
            case("window", left, right, globals_, kinds=kinds, left=left, right=right)
    for globals_ in ("none", "first", "scattered"):
        for padding in ("none", "right", "left", "both sides and a hole", "all"):
            kinds = row_of_kinds(97, _globals(globals_, 97), _padding(padding, 97))
            case("globals", globals_, "padding", padding, kinds=kinds, left=40, right=40)
    rows = [row_of_kinds(97, [0, 50]), row_of_kinds(97, [], range(41, 97)), row_of_kinds(97, range(20), range(90, 97))]
    case("texts of a batch", kinds=torch.cat(rows))
    for dilation, tokens in (
        *itertools.product([(1, 2, 7), (3, 3, 1), (5,)], [1, 7, 61, 131]),
        # Each token is a program.
        *itertools.product([(2**31 - 1,)], [1, 7, 33, 131]),
    ):
        kinds = row_of_kinds(tokens, _globals("scattered", tokens), _padding("right", tokens))
        window = {"left": 9, "right": 5, "dilation": dilation, "heads": len(dilation)}
        case("dilation", *dilation, "of", tokens, kinds=kinds, **window)
    for head_dim, dtype in itertools.product(WINDOW_HEAD_DIMS, _DTYPES):
        tiles, kinds = tiles_for_windows(86, head_dim, dtype), row_of_kinds(300, [0, 150], range(280, 300))
        case("heads of", head_dim, dtype, kinds=kinds, tiles=tiles, left=100, right=90, head_dim=head_dim, dtype=dtype)
    for heads, kv_heads, dilation in ((4, 2, (1,)), (6, 1, (1, 2) * 3), (2, 1, (3,))):
        kinds = torch.cat([row_of_kinds(97, [0, 50]), row_of_kinds(97, [], range(41, 60))])
        case("groups of", heads // kv_heads, *dilation, kinds=kinds, heads=heads, kv_heads=kv_heads, dilation=dilation)
    for head in (64, 128):
        case(
            "heads of 128 in parts of", head, kinds=row_of_kinds(61, [0]), tiles=Tiles(32, 16, 4, 2, head), head_dim=128
        )
    case("scores far beyond exp", kinds=row_of_kinds(61, [0, 30]), size=1000)
    for globals_at in ([], [5, 40]):
        case("bound above", len(globals_at), "globals", kinds=row_of_kinds(61, globals_at), bound=70)
    return cases


_SQUARE = Window(left=16, right=16, heads=1)


_WINDOWS_OF_EVERY_RUN = (
    "globals none 15", "globals none 17", "globals first 32", "globals scattered 33", "globals all 16",
    "globals none 1", "window 40 0 scattered", "window 0 16 none", "globals none padding right",
    "globals first padding left", "globals scattered padding both sides and a hole",
    "globals scattered padding all", "texts of a batch", "dilation 1 2 7 of 61", "dilation 2147483647 of 7",
    "heads of 80 float16", "heads of 128 in parts of 64", "groups of 2 3", "scores far beyond exp",
    "bound above 2 globals",
)  # fmt: skip

_WINDOW_KERNELS = KernelDescription(
    tiles=Tiles(block_queries=32, block_keys=16, num_warps=4, num_stages=2, head=32),
    cases=_window_cases(),
    every_run=_WINDOWS_OF_EVERY_RUN,
    # Blocks of 32 queries: the last one whose windows end before token 128 is the third.
    not_loaded=(_SQUARE, 200, 128, 96, 128),
    fitting=Window(left=256, right=256, heads=12, head_dim=64, bound=16),
    refused=[
        ({"left": -1}, "left is -1; it must be 0 or more"),
        ({"right": -1}, "right is -1; it must be 0 or more"),
        ({"global_bound": -1}, "global_bound is -1; it must be 0 or more"),
        ({"dilation": (1, 2)}, r"dilation is \[1, 2\]; it must have 1 value or 12, one per head, each 1 or more"),
        ({"dilation": (0,)}, r"dilation is \[0\]"),
        ({"dilation": ()}, r"dilation is \[\]"),
    ],
    uncompiled=[],
)


def block_mask(tokens: int) -> torch.Tensor:
    """[3, tokens]: no padding; padding behind and a hole; real tokens here and there, none in the first 16."""
    mask = torch.ones(3, tokens, dtype=torch.int32)
    mask[1, tokens - tokens // 3 :] = 0
    mask[1, tokens // 4] = 0
    mask[2] = (torch.arange(tokens) % 3 == 1) & (torch.arange(tokens) >= min(16, tokens // 2))
    return mask


_PLAIN = Blocks(block=16, first=0, last=0)
_HF_EVAL = Blocks(block=16, repeats=3)
_DENSE = 50
"""Tokens of a text that is short: neither a whole number of blocks nor a length of the tests."""

BLOCK_MODES = {
    "hf_eval": _HF_EVAL,
    "table": replace(_HF_EVAL, repeats=0, listed=(2, 5, 2)),
    "etc": replace(_PLAIN, first=2),
    "blocks": replace(_PLAIN, window=-1, listed=(1, 9, 3)),
}


def _block_cases() -> list[Any]:
    cases: list[Any] = []

    def case(*name: object, **call: Any) -> None:
        cases.append(_case(*name, **call))

    for (mode, layer), tokens, by_row in itertools.product(BLOCK_MODES.items(), (1, 16, 33, 95), (0, 1)):
        layer = replace(layer, by_row=by_row, dense=_DENSE * by_row, heads=2 if layer.listed else 1)
        case(
            mode,
            tokens,
            "by row" * by_row,
            layer=layer,
            kinds=block_mask(tokens),
        )
    for tokens, by_row in itertools.product((_DENSE, _DENSE + 1), (0, 1)):
        mask = torch.zeros(2, 70 if by_row else tokens, dtype=torch.int32)
        mask[:, :tokens] = 1
        case("dense up to 50:", tokens, by_row, layer=replace(_HF_EVAL, dense=_DENSE, by_row=by_row), kinds=mask)
    for tokens, by_row in itertools.product((1, 40), (0, 1)):
        mask = torch.zeros(2, tokens, dtype=torch.int32)
        mask[1, tokens // 2] = 1
        case("nothing but padding", tokens, by_row, layer=replace(_HF_EVAL, by_row=by_row), kinds=mask)
    # A text in two parts, one whose last block is among the first ones, one that is short, and one of padding.
    mask = torch.zeros(4, 520, dtype=torch.int32)
    mask[0], mask[1, :200], mask[2, :100], mask[0, 150:400:7] = 1, 1, 1, 0
    for first, by_row in ((0, 0), (1, 1), (2, 1)):
        layer = replace(_HF_EVAL, block=128, first=first, by_row=by_row, dense=100, heads=1)
        tiles = Tiles(128, 128, 4, 2, 32)
        case("all in parts", first, by_row, layer=layer, kinds=mask, tiles=tiles)
        case("one text in parts", first, by_row, layer=layer, kinds=mask[:1], tiles=tiles)
    for window, first in ((-1, 0), (0, 0), (2, 0), (2**31 - 1, 0), (0, 2**31 - 1)):
        layer = replace(_PLAIN, window=window, first=first, last=window % 2, heads=1)
        case("window", window, first, layer=layer, kinds=block_mask(79))
    for block in (1, 5, 32, 64, 84, 128):
        layer = replace(_HF_EVAL, block=block, heads=1, dtype="float16")
        mask = block_mask(min(3 * block + block // 2 + 4, 300))[1:]
        case("blocks of", block, layer=layer, kinds=mask, tiles=tiles_for_blocks(86, 32, "float16", block))
    for head_dim, dtype in itertools.product(HEAD_DIMS, _DTYPES):
        layer = replace(_HF_EVAL, block=128, heads=1, head_dim=head_dim, dtype=dtype)
        tiles = tiles_for_blocks(86, head_dim, dtype, 128)
        case("heads of", head_dim, dtype, layer=layer, kinds=block_mask(270)[1:2], tiles=tiles)
    case("scores far beyond exp", layer=replace(_HF_EVAL, repeats=2**31 - 1), kinds=block_mask(95), size=1000)
    return cases


_BLOCKS_OF_EVERY_RUN = (
    "hf_eval 1 by row", "hf_eval 16", "hf_eval 33 by row", "table 16", "etc 33", "blocks 33 by row",
    "dense up to 50: 50 1", "dense up to 50: 51 0", "nothing but padding 40 1", "one text in parts 2 1", "window 2 0",
    "blocks of 5", "blocks of 84", "heads of 80 float16",
)  # fmt: skip

_BLOCK_KERNELS = KernelDescription(
    tiles=Tiles(block_queries=16, block_keys=16, num_warps=4, num_stages=2, head=32),
    cases=_block_cases(),
    every_run=_BLOCKS_OF_EVERY_RUN,
    # Block 4 is the first that sees block 5.
    not_loaded=(replace(_PLAIN, heads=1), 128, 80, 64, 64),
    fitting=Blocks(block=64, repeats=3, dense=704, heads=12, head_dim=64),
    refused=[
        ({"block_size": 0}, "block_size is 0; the kernels support blocks of 1 to 1024 tokens"),
        ({"block_size": 2048}, "block_size is 2048; the kernels support blocks of 1 to 1024 tokens"),
        ({"window": -2}, "window is -2; it must be -1 to"),
        ({"last_global": 2}, "last_global is 2; it must be 0 to 1"),
        ({"first_global": -1}, "first_global is -1; it must be 0 to"),
        ({"first_repeats": -1}, "first_repeats is -1; it must be 0 to"),
        ({"dense_tokens": -1}, "dense_tokens is -1; it must be 0 to"),
        ({"last": (3, 62, 3)}, r"listed_blocks is \[3, 62, 3\]; for 12 heads it is \[1 or 12, rows, listed\]"),
        ({"last": (1, 62)}, r"listed_blocks is \[1, 62\]"),
        ({"last": (12, 62, 0)}, r"listed_blocks is \[12, 62, 0\]"),
        ({"block_size": 1, "query": (1, 12, 2**20, 64), "last": (12, 9, 2**20)}, "are too many"),
    ],
    uncompiled=[({"block_size": 1025}, "block_size is 1025; the kernels support blocks of 1 to 1024 tokens")],
)


def chunk_mask(tokens: int) -> torch.Tensor:
    """[5, tokens]: a text of each padding."""
    return torch.cat([torch.from_numpy(token_kinds(padding, tokens, batch=1)) for padding in PADDINGS])


def _circle_cases(layer: Chunks, *, lengths: Sequence[int], seen: Sequence[tuple[int, int, int]]) -> list[Any]:
    """Texts of these lengths under every padding, and chunks that see so many before and after, causally or not."""
    cases = [_case(tokens, layer=layer, kinds=chunk_mask(tokens)) for tokens in lengths]

    def case(
        *name: object,
        tokens: int,
        tiles: Tiles | None = None,
        size: float = 1,
        **changes: Any,
    ) -> None:
        # One text without padding and one with holes.
        kinds, changed = chunk_mask(tokens)[[0, 3]], replace(layer, **changes)
        cases.append(_case(*name, layer=changed, kinds=kinds, tiles=tiles, size=size))

    for tokens, (before, after, causal) in itertools.product((20, 37), seen):
        # Three chunks and five: one more step leads nowhere.
        name = "sees", before, after, "causal" * causal, "of", tokens
        case(*name, tokens=tokens, before=before, after=after, causal=causal)
    for chunk, multiple, tokens in ((1, 1, 9), (5, 3, 37), (16, 1, 70), (40, 1, 70), (64, 2, 70)):
        case("chunks of", chunk, "times", multiple, tokens=tokens, chunk=chunk, multiple=multiple)
    for head_dim, dtype in itertools.product(HEAD_DIMS, _DTYPES):
        changes = {"chunk": 64, "head_dim": head_dim, "dtype": dtype}
        case("heads of", head_dim, dtype, tokens=150, tiles=tiles_for_chunks(86, head_dim, dtype, 64), **changes)
    case("scores far beyond exp", tokens=37, size=1000)
    return cases


_UNDEFINED_CHUNKS = [
    ({"chunk": 0}, "chunk is 0; it must be 1 or more"),
    ({"before": -1}, "before is -1; it must be 0 or more"),
    ({"after": -1}, "after is -1; it must be 0 or more"),
    ({"multiple": 96}, "multiple is 96; it must be a multiple of the chunk's 64 tokens"),
    ({"causal": 2}, "causal is 2; it must be 0 or 1"),
    ({"multiple": 2**30}, "1000 tokens padded to a multiple of 1073741824, .* too many for the kernels"),
    ({"after": 2**30}, "and 1073741824 after, are too many for the kernels"),
]
_CHUNK = Chunks(heads=1)
_CIRCLE_TILES = Tiles(block_queries=16, block_keys=16, num_warps=4, num_stages=2, head=32)

_CHUNKS_OF_EVERY_RUN = (
    "1", "7", "8", "17", "sees 1 0 causal of 20", "sees 2 3 of 37", "sees 9 0 causal of 20", "chunks of 5 times 3",
    "chunks of 40 times 1", "heads of 64 float16", "scores far beyond exp",
)  # fmt: skip

_CHUNK_KERNELS = KernelDescription(
    tiles=_CIRCLE_TILES,
    cases=_circle_cases(
        _CHUNK,
        lengths=(1, 7, 8, 9, 16, 17, 61),
        seen=((0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 0), (2, 3, 0), (2, 3, 1), (3, 0, 0), (9, 0, 1)),
    ),
    every_run=_CHUNKS_OF_EVERY_RUN,
    # Each chunk sees the next one, of which the sixth is the first that holds NaN.
    not_loaded=(replace(_CHUNK, chunk=16, before=0, after=1), 112, 80, 64, 64),
    fitting=Chunks(chunk=64, heads=12, head_dim=64),
    refused=_UNDEFINED_CHUNKS,
    uncompiled=[],
)


def _lsh_cases() -> list[Any]:
    base = Lsh(heads=1)
    cases = _circle_cases(
        base, lengths=(1, 8, 9, 41), seen=((0, 0, 0), (1, 1, 1), (2, 3, 0), (3, 0, 1), (9, 0, 0))
    )  # fmt: skip
    for rounds, by_row, causal in itertools.product((1, 2, 3), (0, 1), (0, 1)):
        layer = replace(base, rounds=rounds, by_row=by_row, causal=causal)
        name = f"{rounds} rounds", "by row" * by_row, "causal" * causal
        cases.append(_case(*name, layer=layer, kinds=chunk_mask(28)))
    for buckets in ((2,), (2, 4), (4, 2, 6), (70,)):
        layer = replace(base, buckets=buckets, by_row=1, chunk=5, multiple=2, heads=2)
        cases.append(_case("buckets", *buckets, layer=layer, kinds=chunk_mask(37)[[1, 3]]))
    layer = replace(base, head_dim=80, chunk=16, rounds=1)
    cases.append(
        _case("few tokens of 80", layer=layer, kinds=chunk_mask(37)[1:2], tiles=replace(_CIRCLE_TILES, head=64))
    )
    cases.append(_case("mean squares of 1e-6", layer=base, kinds=chunk_mask(37)[:1], size=1e-3))
    # Spans of several steps.
    layer = replace(base, chunk=64, buckets=(600,), rounds=1, multiple=3)
    cases.append(_case("many tokens", layer=layer, kinds=chunk_mask(400)[2:3], tiles=Tiles(64, 64, 4, 2, 32)))
    return cases


_LSHS_OF_EVERY_RUN = (
    "1", "8", "sees 1 1 causal of 20", "sees 0 0 of 37", "1 rounds by row causal", "few tokens of 80",
    "mean squares of 1e-6",
)  # fmt: skip

_LSH_KERNELS = KernelDescription(
    tiles=_CIRCLE_TILES,
    cases=_lsh_cases(),
    every_run=_LSHS_OF_EVERY_RUN,
    not_loaded=None,
    fitting=Lsh(chunk=64, heads=12, head_dim=64, buckets=(16, 4), rounds=4),
    refused=[
        *_UNDEFINED_CHUNKS,
        ({"buckets": (16, 3)}, r"buckets is \[16, 3\]; it must be even numbers of 2 or more"),
        ({"buckets": ()}, r"buckets is \[\]; it must be even numbers"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
        ({"rounds": 3}, r"rotations is \[12, 64, 4, 10\]; it must be .*, \[12, 64, 3, 10\]"),
        ({"buckets": (32,)}, r"rotations is \[12, 64, 4, 10\]; it must be .*, \[12, 64, 4, 16\]"),
        ({"last": (1, 64, 4, 10)}, r"rotations is \[1, 64, 4, 10\]"),
        ({"ends_by_row": 2}, "ends_by_row is 2; it must be 0 or 1"),
        ({"buckets": (2**15, 2**16), "last": (12, 64, 4, 49152)}, r"buckets is \[32768, 65536\]: too many"),
    ],
    uncompiled=[],
)

KERNELS = {
    "BlockSparseAttention": _BLOCK_KERNELS,
    "ChunkAttention": _CHUNK_KERNELS,
    "LSHAttention": _LSH_KERNELS,
    "SlidingWindowAttention": _WINDOW_KERNELS,
}
