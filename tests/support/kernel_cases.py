"""Cases for the kernels and plugins of every sparse operator, and cases particular to each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hdplugins import Operator
from hdplugins.attention.kernel_launch import launch
from hdplugins.attention.plugin_face import face_of
from hdplugins.attention.window.plugin import WINDOW_HEAD_DIMS
from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles
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
    # a node, tokens, the first key that holds NaN, the end of the queries that must not see it, and the first of
    # the queries that do; None where hashes decide which keys are seen
    not_loaded: tuple[SparseLayer, int, int, int, int] | None
    fitting: SparseLayer  # a node with twelve heads of 64 that kernels can be launched for
    # attributes, and the shape of a query or of the last input -> the message that refuses a launch
    refused: Sequence[tuple[dict[str, Any], str]]


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


def _tiles_of_gpu(layer: SparseLayer) -> Tiles:
    """A node's tiles for sm_86."""
    shapes = [(1, 1, 1, layer.head_dim)] * layer.operator.states
    return face_of(layer.operator).tiles(shapes, layer.node_attributes, dtype=layer.dtype, architecture=86)


def _case(
    *name: object,
    layer: SparseLayer,
    kinds: torch.Tensor,
    tiles: Tiles | None = None,
    size: float = 1.0,
    is_nightly: bool = False,
) -> Any:
    """A call of a kernel: mask or kinds of tokens, [batch, tokens], and tiles, None for small ones."""
    marks = pytest.mark.nightly if is_nightly else ()
    return pytest.param(layer, kinds, tiles, size, id=" ".join(map(str, name)), marks=marks)


def row_of_kinds(tokens: int, globals_: Sequence[int] = (), padding: Sequence[int] = ()) -> torch.Tensor:
    """[1, tokens]"""
    row = torch.ones(1, tokens, dtype=torch.int32)
    row[0, list(globals_)] = 2
    row[0, list(padding)] = 0
    return row


def _window_cases() -> list[Any]:
    def case(*name: object, kinds: torch.Tensor, **call: Any) -> None:
        others = {key: call.pop(key) for key in ("size", "tiles", "is_nightly") if key in call}
        bound = int((kinds == 2).sum(1).max())
        window = Window(**{"left": 16, "right": 16, "heads": 1, "bound": bound, **call})
        cases.append(_case(*name, layer=window, kinds=kinds, **others))

    cases: list[Any] = []
    for tokens, globals_ in ((1, ()), (15, ()), (17, ()), (32, (0,)), (33, (0, 3, 16, 17, 28)), (16, range(16))):
        case("globals", len(globals_), "of", tokens, kinds=row_of_kinds(tokens, globals_))
    for left, right, globals_ in ((40, 0, (0, 3, 65)), (0, 16, ()), (2**31, 2**40, ())):
        case("window", left, right, kinds=row_of_kinds(131, globals_), left=left, right=right)
    for name, globals_, padding in (
        ("right", (), range(65, 97)),
        ("left", (0,), range(32)),
        ("both sides and a hole", (0, 3, 48, 49, 92), (*range(19), 48, *range(78, 97))),
        ("all", (0, 3, 48), range(97)),
    ):
        case("padding", name, kinds=row_of_kinds(97, globals_, padding), left=40, right=40)
    rows = [row_of_kinds(97, [0, 50]), row_of_kinds(97, [], range(41, 97)), row_of_kinds(97, range(20), range(90, 97))]
    case("texts of a batch", kinds=torch.cat(rows))
    # Of the last dilation, each token is a program.
    for tokens, dilation in ((61, (1, 2, 7)), (131, (5,)), (7, (2**31 - 1,))):
        kinds = row_of_kinds(tokens, [0, 3, tokens // 2], range(tokens - tokens // 3, tokens))
        case("dilation", *dilation, kinds=kinds, left=9, right=5, dilation=dilation, heads=len(dilation))
    for head_dim, dtype in itertools.product(WINDOW_HEAD_DIMS, _DTYPES):
        size: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype}
        size["tiles"] = _tiles_of_gpu(replace(_SQUARE, **size))
        kinds, is_nightly = row_of_kinds(300, [0, 150], range(280, 300)), (head_dim, dtype) != (80, "float16")
        case("heads of", head_dim, dtype, kinds=kinds, left=100, right=90, is_nightly=is_nightly, **size)
    case("heads of 128 in parts", kinds=row_of_kinds(61, [0]), tiles=Tiles(32, 16, 4, 2, 64), head_dim=128)
    kinds = torch.cat([row_of_kinds(97, [0, 50]), row_of_kinds(97, [], range(41, 60))])
    case("groups of 2", kinds=kinds, heads=2, kv_heads=1, dilation=(3,))
    case("scores far beyond exp", kinds=row_of_kinds(61, [0, 30]), size=1000)
    case("bound above 2 globals", kinds=row_of_kinds(61, [5, 40]), bound=70)
    return cases


_SQUARE = Window(left=16, right=16, heads=1)


_WINDOW_KERNELS = KernelDescription(
    tiles=Tiles(block_queries=32, block_keys=16, num_warps=4, num_stages=2, head=32),
    cases=_window_cases(),
    # Blocks of 32 queries: the last one whose windows end before token 128 is the third.
    not_loaded=(_SQUARE, 200, 128, 96, 128),
    fitting=Window(left=256, right=256, heads=12, head_dim=64, bound=16),
    refused=[
        ({"left": -1}, "left is -1; it must be 0 or more"),
        ({"global_bound": -1}, "global_bound is -1; it must be 0 or more"),
        ({"dilation": (1, 2)}, r"dilation is \[1, 2\]; it must have 1 value or 12, one per head, each 1 or more"),
    ],
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

    for mode, tokens, by_row in (
        ("hf_eval", 1, 1),
        ("hf_eval", 16, 0),
        ("hf_eval", 33, 1),
        ("table", 16, 0),
        ("etc", 33, 0),
        ("blocks", 33, 1),
    ):
        layer = BLOCK_MODES[mode]
        layer = replace(layer, by_row=by_row, dense=_DENSE * by_row, heads=2 if layer.listed else 1)
        case(mode, tokens, layer=layer, kinds=block_mask(tokens))
    for tokens, by_row in ((_DENSE, 1), (_DENSE + 1, 0)):
        mask = torch.zeros(2, 70 if by_row else tokens, dtype=torch.int32)
        mask[:, :tokens] = 1
        case("dense up to 50:", tokens, by_row, layer=replace(_HF_EVAL, dense=_DENSE, by_row=by_row), kinds=mask)
    mask = torch.zeros(2, 40, dtype=torch.int32)
    mask[1, 20] = 1
    case("nothing but padding", layer=replace(_HF_EVAL, by_row=1), kinds=mask)
    mask = torch.ones(1, 520, dtype=torch.int32)
    mask[0, 150:400:7] = 0
    layer = replace(_HF_EVAL, block=128, first=2, by_row=1, dense=100, heads=1)
    case("a text in parts", layer=layer, kinds=mask, tiles=Tiles(128, 128, 4, 2, 32))
    for window, first in ((2, 0), (-1, 2**31 - 1)):
        layer = replace(_PLAIN, window=window, first=first, heads=1)
        case("window", window, first, layer=layer, kinds=block_mask(79))
    for block in (5, 84):
        layer = replace(_HF_EVAL, block=block, heads=1, dtype="float16")
        mask = block_mask(min(3 * block + block // 2 + 4, 300))[1:]
        case("blocks of", block, layer=layer, kinds=mask, tiles=_tiles_of_gpu(layer))
    for head_dim, dtype in itertools.product(HEAD_DIMS, _DTYPES):
        layer = replace(_HF_EVAL, block=128, heads=1, head_dim=head_dim, dtype=dtype)
        tiles, is_nightly = _tiles_of_gpu(layer), (head_dim, dtype) != (80, "float16")
        mask = block_mask(270)[1:2]
        case("heads of", head_dim, dtype, layer=layer, kinds=mask, tiles=tiles, is_nightly=is_nightly)
    return cases


_BLOCK_KERNELS = KernelDescription(
    tiles=Tiles(block_queries=16, block_keys=16, num_warps=4, num_stages=2, head=32),
    cases=_block_cases(),
    # Block 4 is the first that sees block 5.
    not_loaded=(replace(_PLAIN, heads=1), 128, 80, 64, 64),
    fitting=Blocks(block=64, repeats=3, dense=704, heads=12, head_dim=64),
    refused=[
        ({"block_size": 2048}, "block_size is 2048; the kernels support blocks of 1 to 1024 tokens"),
        ({"window": -2}, "window is -2; it must be -1 to"),
        ({"last_global": 2}, "last_global is 2; it must be 0 to 1"),
        ({"last": (3, 62, 3)}, r"listed_blocks is \[3, 62, 3\]; for 12 heads it is \[1 or 12, rows, listed\]"),
        ({"last": (12, 62, 0)}, r"listed_blocks is \[12, 62, 0\]"),
        ({"block_size": 1, "query": (1, 12, 2**20, 64), "last": (12, 9, 2**20)}, "are too many"),
    ],
)


def chunk_mask(tokens: int) -> torch.Tensor:
    """[5, tokens]: a text of each padding."""
    return torch.cat([torch.from_numpy(token_kinds(padding, tokens, batch=1)) for padding in PADDINGS])


def _chunk_cases() -> list[Any]:
    """Texts of lengths around chunks under every padding, and chunks that see so many before and after."""
    cases = [_case(tokens, layer=_CHUNK, kinds=chunk_mask(tokens)) for tokens in (1, 7, 8, 17)]

    def case(*name: object, tokens: int, size: float = 1, **changes: Any) -> None:
        others = {key: changes.pop(key) for key in ("tiles", "is_nightly") if key in changes}
        # One text without padding and one with holes.
        kinds, layer = chunk_mask(tokens)[[0, 3]], replace(_CHUNK, **changes)
        cases.append(_case(*name, layer=layer, kinds=kinds, size=size, **others))

    # Of three chunks and of five: a step of more leads nowhere.
    for tokens, before, after, causal in ((20, 1, 0, 1), (37, 2, 3, 0), (20, 9, 0, 1)):
        case("sees", before, after, "of", tokens, tokens=tokens, before=before, after=after, causal=causal)
    for chunk, multiple, tokens in ((5, 3, 37), (40, 1, 70)):
        case("chunks of", chunk, "times", multiple, tokens=tokens, chunk=chunk, multiple=multiple)
    for head_dim, dtype in itertools.product(HEAD_DIMS, _DTYPES):
        changes: dict[str, Any] = {"chunk": 64, "head_dim": head_dim, "dtype": dtype}
        tiles, is_nightly = _tiles_of_gpu(replace(_CHUNK, **changes)), (head_dim, dtype) != (64, "float16")
        case("heads of", head_dim, dtype, tokens=150, tiles=tiles, is_nightly=is_nightly, **changes)
    case("scores far beyond exp", tokens=37, size=1000)
    return cases


_UNDEFINED_CHUNKS = [
    ({"chunk": 0}, "chunk is 0; it must be 1 or more"),
    ({"before": -1}, "before is -1; it must be 0 or more"),
    ({"multiple": 96}, "multiple is 96; it must be a multiple of the chunk's 64 tokens"),
    ({"causal": 2}, "causal is 2; it must be 0 or 1"),
    ({"multiple": 2**30}, "1000 tokens padded to a multiple of 1073741824, .* too many for the kernels"),
    ({"after": 2**30}, "and 1073741824 after, are too many for the kernels"),
]
_CHUNK = Chunks(heads=1)
_CIRCLE_TILES = Tiles(block_queries=16, block_keys=16, num_warps=4, num_stages=2, head=32)

_CHUNK_KERNELS = KernelDescription(
    tiles=_CIRCLE_TILES,
    cases=_chunk_cases(),
    # Each chunk sees the next one, of which the sixth is the first that holds NaN.
    not_loaded=(replace(_CHUNK, chunk=16, before=0, after=1), 112, 80, 64, 64),
    fitting=Chunks(chunk=64, heads=12, head_dim=64),
    refused=_UNDEFINED_CHUNKS,
)


def _lsh_cases() -> list[Any]:
    base = Lsh(heads=1)
    cases = [_case(tokens, layer=base, kinds=chunk_mask(tokens)) for tokens in (1, 8)]
    for name, tokens, changes in (
        ("sees 1 1, causal", 20, {"before": 1, "after": 1, "causal": 1}),
        ("sees nothing else", 37, {"before": 0}),
        ("a round by row, causal", 28, {"rounds": 1, "by_row": 1, "causal": 1}),
    ):
        cases.append(_case(name, layer=replace(base, **changes), kinds=chunk_mask(tokens)[[0, 3]]))
    layer = replace(base, head_dim=80, chunk=16, rounds=1)
    cases.append(
        _case("few tokens of 80", layer=layer, kinds=chunk_mask(37)[1:2], tiles=replace(_CIRCLE_TILES, head=64))
    )
    cases.append(_case("mean squares of 1e-6", layer=base, kinds=chunk_mask(37)[:1], size=1e-3))
    for head_dim, dtype in itertools.product(HEAD_DIMS, _DTYPES):
        layer = replace(base, chunk=64, head_dim=head_dim, dtype=dtype)
        call = {"kinds": chunk_mask(150)[[0, 3]], "tiles": _tiles_of_gpu(layer)}
        cases.append(_case("heads of", head_dim, dtype, layer=layer, is_nightly=True, **call))
    # Spans of several steps.
    layer = replace(base, chunk=64, buckets=(600,), rounds=1, multiple=3)
    call = {"kinds": chunk_mask(400)[2:3], "tiles": Tiles(64, 64, 4, 2, 32)}
    cases.append(_case("many tokens", layer=layer, is_nightly=True, **call))
    return cases


_LSH_KERNELS = KernelDescription(
    tiles=_CIRCLE_TILES,
    cases=_lsh_cases(),
    not_loaded=None,
    fitting=Lsh(chunk=64, heads=12, head_dim=64, buckets=(16, 4), rounds=4),
    refused=[
        *_UNDEFINED_CHUNKS,
        ({"buckets": (16, 3)}, r"buckets is \[16, 3\]; it must be even numbers of 2 or more"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
        ({"buckets": (32,)}, r"rotations is \[12, 64, 4, 10\]; it must be .*, \[12, 64, 4, 16\]"),
        ({"ends_by_row": 2}, "ends_by_row is 2; it must be 0 or 1"),
        ({"buckets": (2**15, 2**16), "last": (12, 64, 4, 49152)}, r"buckets is \[32768, 65536\]: too many"),
    ],
)

KERNELS = {
    "BlockSparseAttention": _BLOCK_KERNELS,
    "ChunkAttention": _CHUNK_KERNELS,
    "LSHAttention": _LSH_KERNELS,
    "SlidingWindowAttention": _WINDOW_KERNELS,
}
