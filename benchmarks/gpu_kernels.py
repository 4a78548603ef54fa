"""Sliding-window attention on an NVIDIA GPU: our kernel against PyTorch's dense SDPA, FlexAttention and the roofline.

Usage: python benchmarks/gpu_kernels.py [--tokens 512 1024 ...] [--head-dims 64 128] [--output FILE]
       python benchmarks/gpu_kernels.py --tune        time other tiles than the table's
       python benchmarks/gpu_kernels.py --compile     registers and spills of every kernel; needs no GPU

Needs torch and triton. Where there is no GPU it says so and exits with 3. Nothing is timed before the kernel has given
the right answers on that GPU, in every dtype and head_dim.

A call is captured in a CUDA graph and replayed, so that launching from Python is not what is measured; each replay
starts with a cold L2 cache. Rates count the work inside the window only: 4 * head_dim floating-point operations for
each query and key that it sees. The roofline takes the rate of a large matrix product and the bandwidth of a large
copy, both measured in the same run. The batch is such that every case has the same number of tokens.

benchmarks/gpu_suite.py calls parts of this, there also with ``device="cpu"`` where Triton interprets: a rehearsal that
proves the code and times nothing.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hdexport.bench.measure.calls import environment
from hdexport.bench.measure.ceilings import measured_ceilings, times_ms
from hdexport.bench.results.result import Ceilings
from hdplugins.kernels.aot import KernelSource
from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles, tiles_for
from hdplugins.operators.sliding_window_attention.geometry import kernel_sources, workspace_bytes
from hdplugins.operators.sliding_window_attention.pairs import pairs

NO_GPU = 3
"""Exit status where there is no GPU."""

WRONG_ANSWERS = 1

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
DTYPES = ("float16", "bfloat16", "float32")
HIDDEN_SIZE = 1024
OPEN_TARGET = ("H100", 64, 380.0)
"""GPU, head_dim and TFLOP/s that a window as wide as the text should reach."""

FLEX_PEERS = {
    "window": "FlexAttention window",
    "bigbird": "FlexAttention bigbird",
    "bigbird, table": "FlexAttention bigbird, table",
}
"""Case of ours -> the one that it should not be slower than."""

_REPEAT_SECONDS = 0.2
_MOST_COMPILED_SHAPES = 64
_INTERPRETED_ARCHITECTURE = 80
"""Whose tiles Triton's interpreter uses."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of query, key and value, and the window of each query; `globals` leading tokens are global."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    dtype: str
    left: int
    right: int
    globals: int = 0


def main() -> int:
    """Check, then time; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--window", type=int, default=256, help="tokens on each side of a query (default: 256)")
    parser.add_argument("--total-tokens", type=int, default=65536, help="batch x tokens (default: 65536)")
    parser.add_argument("--tune", action="store_true", help="time other tiles at the longest of --tokens")
    parser.add_argument("--compile", action="store_true", help="compile every kernel and print what it needs")
    parser.add_argument("--output", type=Path, help="append the results to this file, as JSON lines")
    options = parser.parse_args()
    if options.compile:
        return report(compiled_rows(), options.output, about())
    missing = why_no_gpu()
    if missing:
        print(f"no GPU: {missing}")
        return NO_GPU
    for problem in check_answers("cuda"):
        print(f"wrong answer: {problem}")
        return WRONG_ANSWERS
    print("answers are right in every dtype and head_dim", file=sys.stderr)
    ceilings = measured_ceilings("cuda", options.dtype)
    shapes = {"window": options.window, "total_tokens": options.total_tokens, "ceilings": ceilings, "device": "cuda"}
    if options.tune:
        rows = tuned_rows(max(options.tokens), options.head_dims, **shapes)
    else:
        rows = timed_rows(options.tokens, options.head_dims, **shapes)
    return report(rows, options.output, about())


def check_answers(device: str, *, tiles: Tiles | None = None, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[str]:
    """What is wrong with the kernel on that device: a sentence for each case that fails.

    Args:
        device: "cuda", or "cpu" where Triton interprets.
        tiles: to check instead of the table's.
        head_dims: the sizes of a head to check.
    """
    import torch

    from hdplugins.operators.sliding_window_attention.reference import sliding_window_attention

    for head_dim, dtype in itertools.product(head_dims, DTYPES):
        if device == "cpu" and dtype == "bfloat16":
            continue  # Triton's interpreter multiplies its bit patterns as integers
        for tokens, left, right, dilation in ((1, 16, 16, (1,)), (333, 100, 90, (1, 1, 3)), (700, 256, 256, (1,))):
            if device == "cpu" and tokens > 333:
                continue
            query, key, value = random_tensors(2, 3, tokens, head_dim, dtype, device)
            token_kind = torch.ones(2, tokens, dtype=torch.int32, device=device)
            token_kind[0, tokens - tokens // 4 :] = 0
            token_kind[1, :: max(1, tokens // 4)] = 2
            window = {"left": left, "right": right, "dilation": dilation, "scale": head_dim**-0.5}
            actual = attention_call(query, key, value, token_kind, global_bound=8, tiles=tiles, **window)()
            right_answer = sliding_window_attention(
                query.double().cpu(), key.double().cpu(), value.double().cpu(), token_kind.cpu(), **window
            )
            same_dtype = sliding_window_attention(query.cpu(), key.cpu(), value.cpu(), token_kind.cpu(), **window)
            problem = compare(actual.cpu(), right_answer, same_dtype)
            if problem:
                yield f"{dtype} [2, 3, {tokens}, {head_dim}], {window}: {problem}"


def compare(actual: Any, right: Any, pytorch: Any) -> str | None:
    """What is wrong with `actual`, or None: its error may be twice that of PyTorch in its dtype, and a rounding."""
    import torch

    if not torch.isfinite(actual).all():
        return f"{int((~torch.isfinite(actual)).sum())} values are not finite"
    if (actual[(right == 0).all(-1)] != 0).any():
        return "a row that sees no key is not 0"
    allowed = 2 * float((pytorch.double() - right).abs().max())
    allowed += torch.finfo(actual.dtype).eps * float(right.abs().max())
    error = float((actual.double() - right).abs().max())
    return None if error <= allowed else f"error {error:.3g} > {allowed:.3g}"


def why_no_gpu() -> str | None:
    """Why nothing can be run on a GPU here; None where it can."""
    try:
        import torch
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the package {error.name!r} is not installed, without which none can be used"
    return None if torch.cuda.is_available() else "PyTorch finds none"


def timed_rows(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    *,
    window: int,
    total_tokens: int,
    ceilings: Ceilings,
    device: str,
) -> Iterator[dict[str, Any]]:
    """The kernel and its peers at every length.

    Args:
        lengths: tokens of a text.
        head_dims: the sizes of a head.
        window: tokens on each side of a query.
        total_tokens: batch x tokens.
        ceilings: of the device, in the dtype that is timed.
        device: "cuda", or "cpu" where Triton interprets.
    """
    for head_dim, tokens in itertools.product(head_dims, lengths):
        base = shape_of(head_dim, tokens, total_tokens, ceilings.dtype)
        in_window = Shape(**base, left=window, right=window)
        opened = Shape(**base, left=tokens, right=tokens)
        with_global = Shape(**base, left=window, right=window, globals=1)
        for case, shape, make in (
            ("window", in_window, _ours),
            ("window, 1 global", with_global, _ours),
            ("FlexAttention window", in_window, _flex),
            ("open window", opened, _ours),
            ("torch SDPA dense", opened, _sdpa),
        ):
            yield _row(case, shape, make(shape, device), ceilings)


def tuned_rows(
    tokens: int, head_dims: Sequence[int], *, window: int, total_tokens: int, ceilings: Ceilings, device: str
) -> Iterator[dict[str, Any]]:
    """The kernel with other tiles than the table's; arguments as of `timed_rows`."""
    from triton.runtime.errors import OutOfResources

    for head_dim in head_dims:
        base = shape_of(head_dim, tokens, total_tokens, ceilings.dtype)
        shape = Shape(**base, left=window, right=window, globals=1)
        for tiles in _candidates(head_dim, ceilings.dtype, device):
            try:
                yield {**_row("tiles", shape, _ours(shape, device, tiles), ceilings), "tiles": asdict(tiles)}
            except OutOfResources as error:
                print(f"{tiles} does not fit: {error}", file=sys.stderr)


def shape_of(head_dim: int, tokens: int, total_tokens: int, dtype: str) -> dict[str, Any]:
    """batch, heads, tokens, head_dim and dtype: every case has the same number of tokens."""
    heads, batch = HIDDEN_SIZE // head_dim, max(1, total_tokens // tokens)
    return {"batch": batch, "heads": heads, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}


def _candidates(head_dim: int, dtype: str, device: str) -> Iterator[Tiles]:
    """The table's tiles first, then others."""
    table = tiles_for(architecture_of(device), head_dim, dtype)
    yield table
    heads = {table.head, 1 << (head_dim.bit_length() - 1)}
    for queries, keys, warps, stages, head in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), heads):
        tiles = Tiles(queries, keys, warps, stages, head)
        if tiles != table:
            yield tiles


def _row(case: str, shape: Shape, call: Callable[[], Any], ceilings: Ceilings) -> dict[str, Any]:
    seen = pairs(
        tokens=shape.tokens, heads=shape.heads, global_tokens=shape.globals, left=shape.left, right=shape.right
    )
    return timed_row(case, asdict(shape), seen, call, ceilings)


def timed_row(
    case: str, shape: dict[str, Any], pairs_of_text: int, call: Callable[[], Any], ceilings: Ceilings
) -> dict[str, Any]:
    """How long a call takes, beside the roofline.

    Args:
        case: what is called.
        shape: batch, heads, tokens, head_dim and dtype of query, key and value, and what else the row is to say.
        pairs_of_text: queries and keys that see each other, in all heads of one text.
        call: computes the attention.
        ceilings: of the device, in the dtype.
    """
    batch, tokens, head_dim = (shape[name] for name in ("batch", "tokens", "head_dim"))
    flops = 4 * head_dim * batch * pairs_of_text
    moved_bytes = 4 * batch * shape["heads"] * tokens * head_dim * (4 if shape["dtype"] == "float32" else 2)
    times = times_ms(call, device=ceilings.device, least_s=_REPEAT_SECONDS)
    p20_ms, _, _, p80_ms = statistics.quantiles(times, n=5)
    median_ms = statistics.median(times)
    return {
        "case": case,
        **shape,
        "median_ms": median_ms,
        "p20_ms": p20_ms,
        "p80_ms": p80_ms,
        "tflops": flops / median_ms / 1e9,
        "roofline_ms": max(flops / ceilings.matmul_flops_per_s, moved_bytes / ceilings.copy_bytes_per_s) * 1e3,
    }


def _ours(shape: Shape, device: str, tiles: Tiles | None = None) -> Callable[[], Any]:
    import torch

    query, key, value = _tensors(shape, device)
    token_kind = torch.ones(shape.batch, shape.tokens, dtype=torch.int32, device=device)
    token_kind[:, : shape.globals] = 2
    return attention_call(
        query, key, value, token_kind,
        left=shape.left, right=shape.right, dilation=(1,), scale=shape.head_dim**-0.5, global_bound=shape.globals,
        tiles=tiles,
    )  # fmt: skip


def _sdpa(shape: Shape, device: str) -> Callable[[], Any]:
    import torch

    query, key, value = _tensors(shape, device)
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)


def _flex(shape: Shape, device: str) -> Callable[[], Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
        return (key_index - query_index <= shape.right) & (query_index - key_index <= shape.left)

    allow_many_shapes()
    query, key, value = _tensors(shape, device)
    mask = create_block_mask(near, None, None, shape.tokens, shape.tokens, device=device)
    # A rehearsal does without the compiler, which takes half a minute a shape there.
    attention = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    return lambda: attention(query, key, value, block_mask=mask)


def allow_many_shapes() -> None:
    """Let FlexAttention be compiled for every shape: from the ninth on PyTorch would run it uncompiled."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = _MOST_COMPILED_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def attention_call(
    query: Any, key: Any, value: Any, token_kind: Any, *, tiles: Tiles | None = None, **attributes: Any
) -> Callable[[], Any]:
    """A call of the kernel that allocates nothing; output and workspace hold NaN before the first.

    Args:
        query: [batch, heads, tokens, head_dim], on a GPU, or on the CPU where Triton interprets.
        key: [batch, heads, tokens, head_dim].
        value: [batch, heads, tokens, head_dim].
        token_kind: [batch, tokens], int32.
        tiles: instead of the table's.
        attributes: of the operator, all of them.
    """
    import torch

    from hdplugins.operators.sliding_window_attention.triton_kernel import launch

    batch, _, tokens, head_dim = query.shape
    dtype = str(query.dtype).removeprefix("torch.")
    of_gpu = tiles or tiles_for(architecture_of(query.device.type), head_dim, dtype)
    out = torch.full_like(query, torch.nan)
    size = workspace_bytes(batch, tokens, attributes["global_bound"])
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=query.device)

    def call() -> Any:
        launch(query, key, value, token_kind, out, workspace, tiles=of_gpu, **attributes)
        return out

    return call


def architecture_of(device: str) -> int:
    """Compute capability as in sm_90: 90; of the CPU, the one whose tiles a rehearsal uses."""
    import torch

    if device == "cpu":
        return _INTERPRETED_ARCHITECTURE
    major, minor = torch.cuda.get_device_capability()
    return 10 * int(major) + int(minor)


def _tensors(shape: Shape, device: str) -> tuple[Any, Any, Any]:
    return random_tensors(shape.batch, shape.heads, shape.tokens, shape.head_dim, shape.dtype, device)


def random_tensors(batch: int, heads: int, tokens: int, head_dim: int, dtype: str, device: str) -> tuple[Any, Any, Any]:
    """Query, key and value, [batch, heads, tokens, head_dim]."""
    import torch

    query, key, value = (
        torch.randn(batch, heads, tokens, head_dim, device=device, dtype=getattr(torch, dtype)) for _ in range(3)
    )
    return query, key, value


def compiled_rows(
    sources_of: Callable[..., Sequence[KernelSource]] = kernel_sources,
    *,
    architectures: Sequence[int] = ARCHITECTURES,
    dtypes: Sequence[str] = DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
) -> Iterator[dict[str, Any]]:
    """Registers and spills of a kernel, compiled ahead of time; no GPU is needed."""
    from hdplugins.kernels.aot import compile_kernels

    for dtype, head_dim in itertools.product(dtypes, head_dims):
        start = time.perf_counter()
        kernels = compile_kernels(sources_of(head_dim=head_dim, dtype=dtype, architectures=architectures))
        seconds = time.perf_counter() - start
        for kernel in kernels:
            if kernel.function == "attend":
                yield {
                    "case": "compile", "dtype": dtype, "head_dim": head_dim, "architecture": kernel.architecture,
                    "registers": kernel.registers, "spilled_bytes": kernel.spilled_bytes,
                    "shared_bytes": kernel.shared_bytes, "seconds_of_all_architectures": seconds,
                    "block_size": kernel.constants.get("block_size"),
                }  # fmt: skip


def report(rows: Iterator[dict[str, Any]], output: Path | None, context: dict[str, Any]) -> int:
    """Print each row as it comes, append it to the file, and say at the end whether targets are met."""
    done = []
    for row in rows:
        done.append(row)
        print(line(row), flush=True)
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **context}) + "\n")
    for verdict in verdicts(done, context["environment"].get("gpu", "")):
        print(verdict)
    return 0


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    if row["case"] == "compile":
        blocks = f"block {row['block_size']:<4}" if row.get("block_size") else ""
        return (
            f"{row['dtype']:<9} d{row['head_dim']:<4} {blocks}sm_{row['architecture']:<4} "
            f"{row['registers']:>3} registers  {row['spilled_bytes']:>4} bytes spilled  "
            f"{row['shared_bytes']:>7} bytes shared  "
            f"({row['seconds_of_all_architectures']:.1f} s for all architectures)"
        )
    tiles = " ".join(map(str, row["tiles"].values())) if "tiles" in row else ""
    return (
        f"d{row['head_dim']:<4} {row['batch']:>4} x {row['tokens']:<6} {row['case']:<28} {row['median_ms']:8.3f} ms "
        f"(p20 {row['p20_ms']:.3f}, p80 {row['p80_ms']:.3f})  {row['tflops']:6.1f} TFLOP/s  "
        f"{row['roofline_ms'] / row['median_ms']:.2f} of the roofline  {tiles}"
    )


def verdicts(rows: list[dict[str, Any]], gpu: str) -> Iterator[str]:
    """Whether the targets are met, where what they speak of was measured."""
    by_case = {(row["case"], row.get("head_dim"), row.get("tokens")): row for row in rows if row["case"] != "compile"}
    for ours, peer in FLEX_PEERS.items():
        ratios = [
            by_case[peer, head_dim, tokens]["median_ms"] / row["median_ms"]
            for (case, head_dim, tokens), row in by_case.items()
            if case == ours and head_dim == 64 and (peer, head_dim, tokens) in by_case
        ]
        if ratios:
            median = statistics.median(ratios)
            verdict = "met" if median >= 1 else "MISSED"
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            yield f"{ours} at d64: {median:.2f}x FlexAttention {spread}, target 1.0: {verdict}"
    name, wanted_head_dim, wanted = OPEN_TARGET
    rates = [row["tflops"] for (case, d, _), row in by_case.items() if (case, d) == ("open window", wanted_head_dim)]
    if rates and name in gpu:
        verdict = "met" if max(rates) >= wanted else "MISSED"
        yield f"open window at d{wanted_head_dim}: {max(rates):.0f} TFLOP/s at best, target {wanted:.0f}: {verdict}"


def about(benchmark: str = "gpu_kernels") -> dict[str, Any]:
    """What every row of a file says besides."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(),
    }


if __name__ == "__main__":
    sys.exit(main())
