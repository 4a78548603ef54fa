"""The rows of a run as text to read."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]

_CALLS = ("latency", "graph", "engine", "onnxruntime")
"""Cases whose rows are about whole models, in the order of the lines."""

_OPEN_TARGET = ("H100", 64, 380.0)
"""GPU, head_dim and TFLOP/s that a window as wide as the text should reach."""

_FLEX_PEERS = {
    "window": "FlexAttention window",
    "bigbird": "FlexAttention bigbird",
    "bigbird, table": "FlexAttention bigbird, table",
}
"""Case of ours -> the one that it should not be slower than."""


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """One line per finding; a rehearsal's times are left out, for they mean nothing."""
    if any(row["rehearsal"] for row in rows):
        count = sum(row.get("case") != "step" for row in rows)
        yield f"A rehearsal on the CPU: {count} rows, none of which is a result."
        return
    for row in rows:
        if "matmul_flops_per_s" in row:
            yield (
                f"{row['dtype']:<9} products {row['matmul_flops_per_s'] / 1e12:7.1f} TFLOP/s   "
                f"copies {row['copy_bytes_per_s'] / 1e12:6.3f} TB/s"
            )
    kernels = [row for row in rows if "roofline_ms" in row or row.get("case") == "compile"]
    yield from map(kernel_line, kernels)
    yield from verdicts(kernels, next((row["gpu"] for row in rows if "gpu" in row), ""))
    for case in _CALLS:
        yield from (_call_line(row) for row in rows if row.get("case") == case)


def kernel_line(row: Row) -> str:
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


def verdicts(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """Whether the targets are met, where what they speak of was measured."""
    by_case = {(row["case"], row.get("head_dim"), row.get("tokens")): row for row in rows if row["case"] != "compile"}
    for ours, peer in _FLEX_PEERS.items():
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
    name, wanted_head_dim, wanted = _OPEN_TARGET
    rates = [row["tflops"] for (case, d, _), row in by_case.items() if (case, d) == ("open window", wanted_head_dim)]
    if rates and name in gpu:
        verdict = "met" if max(rates) >= wanted else "MISSED"
        yield f"open window at d{wanted_head_dim}: {max(rates):.0f} TFLOP/s at best, target {wanted:.0f}: {verdict}"


def _call_line(row: Row) -> str:
    """A call of a whole model or bundle."""
    what = f"{row['model']}, {row.get('variant') or row.get('flavour') or row.get('provider')}"
    what += " with our plugin" if row.get("windowed") else ""
    what += " as a CUDA graph" if row["case"] == "graph" else ""
    what += f", {row['batch']} x {row['tokens']}" if "tokens" in row else ""
    if row["status"] != "ok":
        return f"{what}: {row['status']}: {row['reason']}"
    line = f"{what}: {row['p50_ms']:.2f} ms"
    if row.get("allocated_bytes") is not None:
        line += f", {row['allocated_bytes'] / 1e9:.2f} GB of PyTorch's allocator at the peak"
    if "passed" in row:
        verdict = "right" if row["passed"] else "WRONG"
        line += f", {verdict} (cosine {row['min_cosine']:.6f}, max abs error {row['max_abs_error']:.2e})"
    return line
