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
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NO_GPU = 3
"""Exit status where there is no GPU."""

WRONG_ANSWERS = 1

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
DTYPES = ("float16", "bfloat16", "float32")
HIDDEN_SIZE = 1024
OPEN_TARGET = ("H100", 64, 380.0)
"""GPU, head_dim and TFLOP/s that a window as wide as the text should reach."""

_REPEAT_MS = 200
_QUANTILES = (0.5, 0.2, 0.8)


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
        return _report(_compiled(), options.output, _environment())
    missing = _why_no_gpu()
    if missing:
        print(f"no GPU: {missing}")
        return NO_GPU
    for problem in check_answers("cuda"):
        print(f"wrong answer: {problem}")
        return WRONG_ANSWERS
    print("answers are right in every dtype and head_dim", file=sys.stderr)
    rows = _tuned(options) if options.tune else _timed(options)
    return _report(rows, options.output, {**_environment(), **_gpu()})


def check_answers(device: str, *, geometry: Any = None, head_dims: tuple[int, ...] | None = None) -> Iterator[str]:
    """What is wrong with the kernel on that device: a sentence for each case that fails.

    Args:
        device: "cuda", or "cpu" where Triton interprets.
        geometry: tiles to check instead of the table's.
        head_dims: the sizes of a head to check, all by default.
    """
    import torch

    from hdplugins.sliding_window_attention.geometry import HEAD_DIMS
    from hdplugins.sliding_window_attention.reference import sliding_window_attention

    for head_dim, dtype in itertools.product(head_dims or HEAD_DIMS, DTYPES):
        if device == "cpu" and dtype == "bfloat16":
            continue  # Triton's interpreter multiplies its bit patterns as integers
        for tokens, left, right, dilation in ((1, 16, 16, (1,)), (333, 100, 90, (1, 1, 3)), (700, 256, 256, (1,))):
            if device == "cpu" and tokens > 333:
                continue
            query, key, value = _random(2, 3, tokens, head_dim, dtype, device)
            token_kind = torch.ones(2, tokens, dtype=torch.int32, device=device)
            token_kind[0, tokens - tokens // 4 :] = 0
            token_kind[1, :: max(1, tokens // 4)] = 2
            window = {"left": left, "right": right, "dilation": dilation, "scale": head_dim**-0.5}
            actual = _attention(query, key, value, token_kind, global_bound=8, geometry=geometry, **window)()
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


def pairs(shape: Shape) -> int:
    """Queries and keys that see each other, in all heads and texts."""
    seen = 0
    for token in range(shape.tokens):
        first, last = max(0, token - shape.left), min(shape.tokens - 1, token + shape.right)
        seen += last - first + 1 + min(first, shape.globals) + max(0, shape.globals - last - 1)
    return seen * shape.heads * shape.batch


def _why_no_gpu() -> str | None:
    try:
        import torch
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the package {error.name!r} is not installed, without which none can be used"
    return None if torch.cuda.is_available() else "PyTorch finds none"


def _timed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    peak_flops, bandwidth = _ceilings(options.dtype)
    for head_dim, tokens in itertools.product(options.head_dims, options.tokens):
        base = {
            "batch": max(1, options.total_tokens // tokens), "heads": HIDDEN_SIZE // head_dim,
            "tokens": tokens, "head_dim": head_dim, "dtype": options.dtype,
        }  # fmt: skip
        window = Shape(**base, left=options.window, right=options.window)
        opened = Shape(**base, left=tokens, right=tokens)
        with_global = Shape(**base, left=options.window, right=options.window, globals=1)
        for case, shape, make in (
            ("window", window, _ours),
            ("window, 1 global", with_global, _ours),
            ("FlexAttention window", window, _flex),
            ("open window", opened, _ours),
            ("torch SDPA dense", opened, _sdpa),
        ):
            yield _row(case, shape, make(shape), peak_flops, bandwidth)


def _tuned(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from triton.runtime.errors import OutOfResources

    peak_flops, bandwidth = _ceilings(options.dtype)
    tokens = max(options.tokens)
    for head_dim in options.head_dims:
        shape = Shape(
            batch=max(1, options.total_tokens // tokens), heads=HIDDEN_SIZE // head_dim, tokens=tokens,
            head_dim=head_dim, dtype=options.dtype, left=options.window, right=options.window, globals=1,
        )  # fmt: skip
        for geometry in _candidates(head_dim, options.dtype):
            try:
                yield {
                    **_row("tiles", shape, _ours(shape, geometry), peak_flops, bandwidth), "geometry": asdict(geometry)
                }  # fmt: skip
            except OutOfResources as error:
                print(f"{geometry} does not fit: {error}", file=sys.stderr)


def _candidates(head_dim: int, dtype: str) -> Iterator[Any]:
    """The table's tiles first, then others."""
    from hdplugins.sliding_window_attention.geometry import Geometry

    table = _geometry(head_dim, dtype)
    yield table
    heads = {table.head, 1 << (head_dim.bit_length() - 1)}
    for queries, keys, warps, stages, head in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), heads):
        geometry = Geometry(queries, keys, table.block_globals, warps, stages, head)
        if geometry != table:
            yield geometry


def _row(case: str, shape: Shape, call: Callable[[], Any], peak_flops: float, bandwidth: float) -> dict[str, Any]:
    flops = 4 * shape.head_dim * pairs(shape)
    moved_bytes = 4 * shape.batch * shape.heads * shape.tokens * shape.head_dim * (4 if shape.dtype == "float32" else 2)
    median_ms, p20_ms, p80_ms = _quantiles_ms(call)
    return {
        "case": case,
        **asdict(shape),
        "median_ms": median_ms,
        "p20_ms": p20_ms,
        "p80_ms": p80_ms,
        "tflops_in_window": flops / median_ms / 1e9,
        "roofline_ms": max(flops / peak_flops, moved_bytes / bandwidth) * 1e3,
    }


def _quantiles_ms(call: Callable[[], Any]) -> tuple[float, float, float]:
    """Median, p20 and p80 of replays of one captured call."""
    import torch
    import triton.testing

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, and allocates what is cached
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return tuple(triton.testing.do_bench(graph.replay, rep=_REPEAT_MS, quantiles=list(_QUANTILES)))


def _ceilings(dtype: str) -> tuple[float, float]:
    """Floating-point operations and bytes a second, of the fastest matrix product and copy that PyTorch does here."""
    import torch

    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
    product_ms = _quantiles_ms(lambda: left @ right)[0]
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    copy_ms = _quantiles_ms(lambda: target.copy_(source))[0]
    return 2 * size**3 / product_ms * 1e3, 2 * source.nbytes / copy_ms * 1e3


def _ours(shape: Shape, geometry: Any = None) -> Callable[[], Any]:
    import torch

    query, key, value = _tensors(shape)
    token_kind = torch.ones(shape.batch, shape.tokens, dtype=torch.int32, device="cuda")
    token_kind[:, : shape.globals] = 2
    return _attention(
        query, key, value, token_kind,
        left=shape.left, right=shape.right, dilation=(1,), scale=shape.head_dim**-0.5, global_bound=shape.globals,
        geometry=geometry,
    )  # fmt: skip


def _sdpa(shape: Shape) -> Callable[[], Any]:
    import torch

    query, key, value = _tensors(shape)
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)


def _flex(shape: Shape) -> Callable[[], Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
        return (key_index - query_index <= shape.right) & (query_index - key_index <= shape.left)

    query, key, value = _tensors(shape)
    mask = create_block_mask(near, None, None, shape.tokens, shape.tokens, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, key, value, block_mask=mask)


def _attention(query: Any, key: Any, value: Any, token_kind: Any, *, geometry: Any, **attributes: Any) -> Any:
    """A call of the kernel that allocates nothing; output and workspace hold NaN before the first."""
    import torch

    from hdplugins.sliding_window_attention.geometry import workspace_bytes
    from hdplugins.sliding_window_attention.triton_kernel import launch

    batch, _, tokens, head_dim = query.shape
    tiles = geometry or _geometry(head_dim, str(query.dtype).removeprefix("torch."))
    out = torch.full_like(query, torch.nan)
    size = workspace_bytes(batch, tokens, attributes["global_bound"])
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=query.device)

    def call() -> Any:
        launch(query, key, value, token_kind, out, workspace, geometry=tiles, **attributes)
        return out

    return call


def _geometry(head_dim: int, dtype: str) -> Any:
    import torch

    from hdplugins.sliding_window_attention.geometry import geometry_for

    major, minor = torch.cuda.get_device_capability()
    return geometry_for(10 * major + minor, head_dim, dtype)


def _tensors(shape: Shape) -> tuple[Any, Any, Any]:
    return _random(shape.batch, shape.heads, shape.tokens, shape.head_dim, shape.dtype, "cuda")


def _random(batch: int, heads: int, tokens: int, head_dim: int, dtype: str, device: str) -> tuple[Any, Any, Any]:
    import torch

    query, key, value = (
        torch.randn(batch, heads, tokens, head_dim, device=device, dtype=getattr(torch, dtype)) for _ in range(3)
    )
    return query, key, value


def _compiled() -> Iterator[dict[str, Any]]:
    from hdplugins.aot import compile_kernels
    from hdplugins.sliding_window_attention.geometry import HEAD_DIMS, kernel_sources

    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        start = time.perf_counter()
        kernels = compile_kernels(kernel_sources(head_dim=head_dim, dtype=dtype, architectures=ARCHITECTURES))
        seconds = time.perf_counter() - start
        for kernel in kernels:
            if kernel.function == "attend":
                yield {
                    "case": "compile", "dtype": dtype, "head_dim": head_dim, "architecture": kernel.architecture,
                    "registers": kernel.registers, "spilled_bytes": kernel.spilled_bytes,
                    "shared_bytes": kernel.shared_bytes, "seconds_of_all_architectures": seconds,
                }  # fmt: skip


def _report(rows: Iterator[dict[str, Any]], output: Path | None, environment: dict[str, Any]) -> int:
    done = []
    for row in rows:
        done.append(row)
        print(_line(row), flush=True)
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **environment}) + "\n")
    for verdict in _verdicts(done, environment.get("gpu", "")):
        print(verdict)
    return 0


def _line(row: dict[str, Any]) -> str:
    if row["case"] == "compile":
        return (
            f"{row['dtype']:<9} d{row['head_dim']:<4} sm_{row['architecture']:<4} {row['registers']:>3} registers  "
            f"{row['spilled_bytes']:>4} bytes spilled  {row['shared_bytes']:>7} bytes shared  "
            f"({row['seconds_of_all_architectures']:.1f} s for all architectures)"
        )
    tiles = " ".join(map(str, row["geometry"].values())) if "geometry" in row else ""
    return (
        f"d{row['head_dim']:<4} {row['batch']:>4} x {row['tokens']:<6} {row['case']:<21} {row['median_ms']:8.3f} ms "
        f"(p20 {row['p20_ms']:.3f}, p80 {row['p80_ms']:.3f})  {row['tflops_in_window']:6.1f} TFLOP/s  "
        f"{row['roofline_ms'] / row['median_ms']:.2f} of the roofline  {tiles}"
    )


def _verdicts(rows: list[dict[str, Any]], gpu: str) -> Iterator[str]:
    """Whether the targets are met, where what they speak of was measured."""
    by_case = {(row["case"], row.get("head_dim"), row.get("tokens")): row for row in rows if row["case"] != "compile"}
    ratios = [
        by_case["FlexAttention window", head_dim, tokens]["median_ms"] / row["median_ms"]
        for (case, head_dim, tokens), row in by_case.items()
        if case == "window" and head_dim == 64 and ("FlexAttention window", head_dim, tokens) in by_case
    ]
    if ratios:
        median = statistics.median(ratios)
        verdict = "met" if median >= 1 else "MISSED"
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        yield f"window at d64: {median:.2f}x FlexAttention {spread}, target 1.0: {verdict}"
    name, wanted_head_dim, wanted = OPEN_TARGET
    rates = [
        row["tflops_in_window"]
        for (case, d, _), row in by_case.items()
        if (case, d) == ("open window", wanted_head_dim)
    ]
    if rates and name in gpu:
        verdict = "met" if max(rates) >= wanted else "MISSED"
        yield f"open window at d{wanted_head_dim}: {max(rates):.0f} TFLOP/s at best, target {wanted:.0f}: {verdict}"


def _environment() -> dict[str, Any]:
    return {
        "benchmark": "gpu_kernels",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("hdexport", "torch", "triton")},
    }


def _gpu() -> dict[str, Any]:
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "driver": driver,
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    sys.exit(main())
