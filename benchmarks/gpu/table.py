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

_CANDIDATE_TARGETS = {64: 1.0, 128: 0.9}
"""head_dim -> times as fast as FlashAttention 4 that the candidate in Gluon should be."""

_CANDIDATE_PEERS = {
    "our candidate in Gluon, window": "FlashAttention 4 window",
    "our candidate in Gluon, dense": "FlashAttention 4 dense",
}

_CORPUS_TARGETS = (("mixed", "default", 2.0), ("mixed", "best", 1.3), ("short", "best", 1.5))
"""Corpus, batch size of sentence-transformers, and how many times as fast as it a bundle should be."""

ALL_ON_CPU, ON_GPU, VECTORS = "hidden states to the CPU", "hidden states on the GPU", "vectors to the CPU"
"""Answers that are asked for, and where."""

_ANSWERS_GPU = "H200"
_ANSWER_GOALS = {
    ("longformer-base", ON_GPU, 1, 4096): 5.0,
    ("longformer-base", ON_GPU, 8, 4096): 22.0,
    ("longformer-base", ALL_ON_CPU, 8, 4096): 27.0,
    ("bert-base", ON_GPU, 8, 4096): 26.0,
    ("bert-base, windows", ON_GPU, 1, 4096): 3.2,
    ("bert-base, windows", ON_GPU, 8, 4096): 17.5,
    ("bigbird-base", ON_GPU, 1, 4096): 4.0,
    ("bigbird-base", ON_GPU, 8, 4096): 20.0,
}
"""On that GPU, model, answers, texts and tokens -> milliseconds at most of its bundle in ONNX Runtime by kernels."""

_MODEL_GOALS = {
    ("bert-base", "our kernel, window", 1, 4096): 2.4,
    ("bert-base", "our kernel, window", 8, 4096): 17.1,
}
"""Model, variant, texts and tokens -> milliseconds at most of its CUDA graph, as FlexAttention takes on an
H100 (2026-11-26)."""

_PEER_TIMES = {"torch.compile": 1.1}
"""Times as long as a peer of the same step a bundle takes at most by kernels; others are compared alone."""

_GROWTH = 2.5
"""Times that memory grows at most from 8192 tokens to 16384 as from 4096 to 8192: twice in proportion, and four times
where it is quadratic."""

_VECTORS_MS = 0.3
"""Milliseconds at most that a vector of each text takes more than hidden states that stay on the GPU."""

_BUSY_TARGETS = {"mixed": 0.75, "long": 0.85}
"""Corpus -> the share of time in which the GPU should compute."""

_PASSAGE_TOKENS = 68
_PASSAGES_PER_SECOND = 2 * 17_319
"""Passages per second on a Hopper GPU, for MS MARCO's tokens per passage: twice the published rate on an A100."""

_HOPPERS = ("H100", "H200")


def findings_of(rows: Sequence[Row]) -> Iterator[str]:
    """One line per measurement; a rehearsal's times are left out, for they mean nothing."""
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
    for case in _CALLS:
        yield from (_call_line(row) for row in rows if row.get("case") == case)
    yield from map(_corpus_line, _corpus_series(rows))
    yield from (_job_line(row) for row in rows if row.get("case") == "corpus job" and not row.get("trial"))
    yield from map(kernel_line, _kernel_rows(rows))


def verdicts_of(rows: Sequence[Row]) -> Iterator[str]:
    """One line per goal, where what it speaks of was measured."""
    if any(row["rehearsal"] for row in rows):
        return
    gpu = next((row["gpu"] for row in rows if "gpu" in row), "")
    yield from verdicts(_kernel_rows(rows), gpu)
    yield from corpus_verdicts(_corpus_series(rows), gpu)
    yield from answer_verdicts(rows, gpu)
    yield from model_verdicts(rows, gpu)
    yield from peer_verdicts(rows)
    yield from growth_verdicts(rows)


def _kernel_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "roofline_ms" in row or row.get("case") == "compile"]


def _corpus_series(rows: Sequence[Row]) -> list[Row]:
    """The last row of each series."""
    return list(
        {
            (row["corpus"], row["title"]): row for row in rows if row.get("case") == "corpus" and not row.get("trial")
        }.values()
    )


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
    tiles = " ".join(map(str, row["block_config"].values())) if "block_config" in row else ""
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
            verdict = _verdict(median >= 1)
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            yield f"{ours} at d64: {median:.2f}x FlexAttention {spread}, target 1.0: {verdict}"
    for ours, peer in _CANDIDATE_PEERS.items():
        for head_dim, target in _CANDIDATE_TARGETS.items():
            ratios = [
                by_case[peer, head_dim, tokens]["median_ms"] / row["median_ms"]
                for (case, d, tokens), row in by_case.items()
                if (case, d) == (ours, head_dim) and (peer, head_dim, tokens) in by_case
            ]
            if ratios:
                found = statistics.median(ratios)
                spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
                verdict = _verdict(found >= target)
                yield f"{ours} at d{head_dim}: {found:.2f}x {peer} {spread}, target {target}: {verdict}"
    name, wanted_head_dim, wanted = _OPEN_TARGET
    rates = [row["tflops"] for (case, d, _), row in by_case.items() if (case, d) == ("open window", wanted_head_dim)]
    if rates and name in gpu:
        verdict = _verdict(max(rates) >= wanted)
        yield f"open window at d{wanted_head_dim}: {max(rates):.0f} TFLOP/s at best, target {wanted:.0f}: {verdict}"


def answer_verdicts(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """Whether answers are where they are wanted as soon as they should be, on the GPU that the goals are for."""
    times = {
        (row["model"], row["answers"], row["batch"], row["tokens"]): row["p50_ms"]
        for row in rows
        if _is_timed_answer(row) and row.get("attention") != "bodies"
    }
    if _ANSWERS_GPU not in gpu:
        return
    for (model, answers, batch, tokens), wanted in _ANSWER_GOALS.items():
        if (model, answers, batch, tokens) in times:
            found = times[model, answers, batch, tokens]
            what = f"{model}, {answers}, {batch} x {tokens}"
            yield f"{what}: {found:.2f} ms, target {wanted:g}: {_verdict(found <= wanted)}"
    for (model, answers, batch, tokens), found in times.items():
        if answers == VECTORS and (model, ON_GPU, batch, tokens) in times:
            more = found - times[model, ON_GPU, batch, tokens]
            verdict = _verdict(more <= _VECTORS_MS)
            yield f"{model}, {VECTORS}, {batch} x {tokens}: {more:+.2f} ms, target {_VECTORS_MS:g}: {verdict}"


def model_verdicts(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """Whether models in PyTorch by our kernels are as fast as by FlexAttention, on a GPU of the goals' generation."""
    if not any(name in gpu for name in _HOPPERS):
        return
    for row in rows:
        wanted = _MODEL_GOALS.get((row.get("model"), row.get("variant"), row.get("batch"), row.get("tokens")))
        if wanted is not None and row["case"] == "graph" and row["status"] == "ok" and not row.get("trial"):
            yield f"{_call_line(row)}, target {wanted:g}: {_verdict(row['p50_ms'] <= wanted)}"


def peer_verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """How long a bundle takes by kernels and by the bodies beside a peer, whose answers stay on the GPU as well, where
    one step timed all of them."""
    peers = {
        (row["step"], row["batch"], row["tokens"]): row
        for row in rows
        if row.get("case") == "latency" and row["status"] == "ok" and not row.get("trial")
    }
    for row in rows:
        if _is_timed_answer(row) and row["answers"] == ON_GPU and "attention" in row:
            peer = peers.get((row["step"], row["batch"], row["tokens"]))
            if peer is not None:
                times = row["p50_ms"] / peer["p50_ms"]
                what = f"{row['model']} by {row['attention']}, {row['batch']} x {row['tokens']}"
                found = f"{what}: {times:.2f} of the time of {peer['variant']}, {peer['p50_ms']:.2f} ms"
                target = _PEER_TIMES.get(peer["variant"]) if row["attention"] == "kernels" else None
                yield found + ("" if target is None else f", target {target:g}: {_verdict(times <= target)}")


def _is_timed_answer(row: Row) -> bool:
    """Whether a row says how long a bundle takes until its answers are where they are wanted."""
    return row.get("case") == "onnxruntime" and "answers" in row and row["status"] == "ok" and not row.get("trial")


def growth_verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Whether a bundle's memory at its peak grows as its tokens do, where three lengths of one text were measured."""
    peaks: dict[str, dict[int, int]] = {}
    for row in rows:
        if row.get("answers") == ON_GPU and row.get("status") == "ok" and row["batch"] == 1 and row.get("vram_bytes"):
            peaks.setdefault(row["model"], {})[row["tokens"]] = row["vram_bytes"]
    for model, peak in peaks.items():
        if {4096, 8192, 16384} <= peak.keys():
            first, second = peak[8192] - peak[4096], peak[16384] - peak[8192]
            verdict = _verdict(second <= _GROWTH * first)
            grown = f"{model}, memory from 4096 to 8192 tokens: {first / 1e6:+.0f} MB, to 16384: {second / 1e6:+.0f} MB"
            yield f"{grown}, target {_GROWTH:g} times as much: {verdict}"


def corpus_verdicts(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """Whether a bundle is as fast, and keeps the GPU as busy, as it should, where both sides were measured."""
    rates: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["seconds"]:
            kind = ("default" if row["is_default"] else "best") if row["is_baseline"] else "ours"
            # The best size is one at which no peer is faster, and may be the default.
            for key in {(row["corpus"], kind), *([(row["corpus"], "best")] if row["is_baseline"] else [])}:
                rates[key] = max(rates.get(key, 0.0), _texts_per_second(row))
    for corpus, size, wanted in _CORPUS_TARGETS:
        if (corpus, "ours") in rates and (corpus, size) in rates:
            ratio = rates[corpus, "ours"] / rates[corpus, size]
            yield (
                f"{corpus} corpus: {ratio:.2f}x sentence-transformers at its {size} batch size, target {wanted}: "
                f"{_verdict(ratio >= wanted)}"
            )
    for row in rows:
        target = _BUSY_TARGETS.get(row["corpus"])
        if target is not None and not row["is_baseline"] and row["gpu_busy_share"]:
            share = statistics.median(row["gpu_busy_share"])
            yield (
                f"{row['corpus']} corpus: the GPU computes {share:.0%} of the time, target {target:.0%}: "
                f"{_verdict(share >= target)}"
            )
        is_hopper = any(name in gpu for name in _HOPPERS)
        if row["corpus"] == "passages" and is_hopper and not row["is_baseline"] and row["seconds"]:
            rate = row["tokens"] / _PASSAGE_TOKENS / statistics.median(row["seconds"])
            yield (
                f"{rate:,.0f} passages/s of {_PASSAGE_TOKENS} tokens, target {_PASSAGES_PER_SECOND:,}: "
                f"{_verdict(rate >= _PASSAGES_PER_SECOND)}"
            )


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def _texts_per_second(row: Row) -> float:
    return row["texts"] / statistics.median(row["seconds"])  # type: ignore[no-any-return]


def _corpus_line(row: Row) -> str:
    """A series of a corpus."""
    what = f"{row['corpus']} corpus, {row['title']}"
    if not row["seconds"]:
        return f"{what}: not run: {row['unavailable']}"
    busy = row["gpu_busy_share"]
    return (
        f"{what}: {_texts_per_second(row):,.0f} texts/s, {row['tokens'] / statistics.median(row['seconds']):,.0f} "
        f"tokens/s, {_of_gpu(statistics.median(busy) if busy else None, row['gpu_peak_bytes'])}, "
        f"{row['peak_bytes'] / 1e9:.2f} GB of the process"
    )


def _job_line(row: Row) -> str:
    """A whole job."""
    what = f"{row['texts']:,} texts, {row['what']}"
    if row["status"] != "ok":
        return f"{what}: {row['status']}: {row['reason']}"
    return (
        f"{what}: {row['seconds']:.1f} s, {_of_gpu(row['gpu_busy_share'], row['gpu_peak_bytes'])}, "
        f"{row['peak_bytes'] / 1e9:.2f} GB of the process"
    )


def _of_gpu(busy_share: float | None, peak_bytes: int | None) -> str:
    busy = "not known how busy the GPU is" if busy_share is None else f"GPU busy {busy_share:.0%}"
    return busy if peak_bytes is None else f"{busy}, {peak_bytes / 1e9:.2f} GB of the GPU"


def _call_line(row: Row) -> str:
    """A call of a whole model or bundle."""
    what = f"{row['model']}, {row.get('variant') or row.get('provider')}"
    what += " with our plugin" if row.get("windowed") else ""
    what += f" by {row['attention']}" if "attention" in row else ""
    what += f", {row['answers']}" if "answers" in row else ""
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
