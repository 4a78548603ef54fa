"""The rows of a run as text to read."""

from __future__ import annotations

__all__ = ["lines_of"]

from collections.abc import Iterator, Sequence
from typing import Any

import gpu_kernels

Row = dict[str, Any]

_WIDTH = 15


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """What was found, a part a kind of row; a rehearsal's times are left out, for they mean nothing."""
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
    yield from map(gpu_kernels.line, kernels)
    yield from gpu_kernels.verdicts(kernels, _gpu_of(rows))
    for case, title in (("latency", "p50 ms, with peak GB of PyTorch"), ("graph", "p50 ms of a CUDA graph")):
        yield from _model_table([row for row in rows if row.get("case") == case], title)
    for row in rows:
        if row.get("case") in ("engine", "onnxruntime"):
            yield _backend_line(row)


def _gpu_of(rows: Sequence[Row]) -> str:
    return next((row["torch"].get("name", "") for row in rows if "torch" in row), "")


def _model_table(rows: Sequence[Row], title: str) -> Iterator[str]:
    """A line a model, variant and batch; a column a length."""
    if not rows:
        return
    lengths = sorted({row["tokens"] for row in rows})
    cells = {(row["model"], row["variant"], row["batch"], row["tokens"]): _cell(row) for row in rows}
    yield f"{title:<46}" + "".join(f"{tokens:>{_WIDTH}}" for tokens in lengths)
    for model, variant, batch in dict.fromkeys(key[:3] for key in cells):
        of_lengths = (cells.get((model, variant, batch, tokens), "") for tokens in lengths)
        yield f"{model:<16}{variant:<22}batch {batch:<2}" + "".join(f"{cell:>{_WIDTH}}" for cell in of_lengths)


def _cell(row: Row) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    peak_bytes = row.get("allocated_bytes")
    return f"{row['p50_ms']:.2f}" + (f" ({peak_bytes / 1e9:.2f})" if peak_bytes is not None else "")


def _backend_line(row: Row) -> str:
    what = row.get("flavour") or row.get("provider")
    kind = " with our plugin" if row.get("windowed") else ""
    if row["status"] != "ok":
        return f"{what}{kind}: {row['status']}: {row['reason']}"
    verdict = "right" if row["passed"] else "WRONG"
    return (
        f"{what}{kind}, {row['batch']} x {row['tokens']}: {row['p50_ms']:.2f} ms, {verdict} "
        f"(cosine {row['min_cosine']:.6f}, max abs error {row['max_abs_error']:.2e})"
    )
