"""A bundle's answers, compared with PyTorch's over a grid of lengths, batches and paddings."""

from __future__ import annotations

__all__ = ["Check", "summary", "verify_bundle"]

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

import hdruntime
from hdexport.comparison import Comparison, compare
from hdexport.memory import free_bytes
from hdexport.pytorch_reference import Reference
from hdexport.tasks import Task
from hdexport.verify_grid import LONGEST_CHECKED, Case, cases
from hdruntime.bundle import Bundle, GraphFile, Manifest
from hdruntime.constants import CUDA_LOWERING
from hdruntime.errors import NonFiniteOutputError

logger = logging.getLogger(__name__)

_SCORES_LIMIT_BYTES = 512 * 2**20
"""Attention scores that a masked or portable attention may materialise in a build's checks; larger cases are reported
as not checked, for the first touch of that memory takes seconds. When thorough, half of the free memory may be used."""

_ERRORS_ONLY = 3
"""ONNX Runtime's log level."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one case for one graph.

    Attributes:
        graph: the graph's file.
        case: the input.
        outputs: name of each output -> what the comparison found.
    """

    graph: str
    case: Case
    outputs: dict[str, Comparison]

    @property
    def passed(self) -> bool:
        """Whether every output holds its tolerance."""
        return all(found.passed for found in self.outputs.values())

    @property
    def max_abs_error(self) -> float:
        """Largest absolute difference over the outputs."""
        return max(found.max_abs_error for found in self.outputs.values())

    @property
    def min_cosine(self) -> float:
        """Smallest cosine over the outputs."""
        return min(found.min_cosine for found in self.outputs.values())

    @property
    def tolerance(self) -> str:
        """The tolerance, in words."""
        return next(iter(self.outputs.values())).tolerance

    def line(self) -> str:
        """The outcome in one line."""
        failed = [name for name, found in self.outputs.items() if not found.passed]
        return (
            f"-[{'x' if self.passed else ' '}] {self.graph}: batch {self.case.batch}, tokens {self.case.tokens}, "
            f"padding {self.case.padding}: max abs error {self.max_abs_error:.2e}, "
            f"cosine {self.min_cosine:.6f} ({self.tolerance})" + (f" FAILED: {', '.join(failed)}" if failed else "")
        )


def verify_bundle(
    bundle: Bundle,
    reference: Reference,
    *,
    longest: int = LONGEST_CHECKED,
    thorough: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[Check]:
    """Run every graph of a bundle over the grid and compare it with PyTorch.

    Args:
        bundle: the bundle.
        reference: PyTorch's answers.
        longest: lengths above it are left out, which `report` is told.
        thorough: check every case at long lengths, too; see `cases`.
        report: called with one line a check.

    Returns:
        All outcomes; the bundle is right where all have passed.
    """
    manifest = bundle.manifest
    base = manifest.positions.base
    lengths = {"windows": manifest.windows, "blocks": manifest.block_sparse, "longest": longest}
    grid = list(cases(base, manifest.max_len, **lengths, thorough=thorough))  # type: ignore[arg-type]
    reason = _why_not_left(manifest, reference)
    if reason is not None:
        grid = [case for case in grid if case.padding != "left"]
        report(f"-[-] padding left: not checked: {reason}")
    # All of PyTorch's answers come first: its threads and ONNX Runtime's spin, and would take turns to wait.
    expected = {case: _expected(case, reference, manifest) for case in grid}
    limit_bytes = (free_bytes() or 2 * _SCORES_LIMIT_BYTES) // 2 if thorough else _SCORES_LIMIT_BYTES
    checks = []
    for graph in manifest.graphs:
        if graph.lowering == CUDA_LOWERING:
            report(f"-[-] {graph.file}: not checked: that needs an NVIDIA GPU")
            continue
        if graph.dtype == "bfloat16":
            report(f"-[-] {graph.file}: not checked: ONNX Runtime has no bfloat16 on a CPU")
            continue
        run = _runner(bundle, graph)
        for case in grid:
            scores_bytes = _scores_bytes(graph, case, manifest)
            if scores_bytes > limit_bytes:
                report(
                    f"-[-] {graph.file}: batch {case.batch}, tokens {case.tokens}, padding {case.padding}: "
                    f"not checked: its attention scores take {scores_bytes / 2**30:.1f} GiB"
                )
                continue
            try:
                check = _check(bundle, graph, case, expected[case], run(_padded_batch(case, reference)))
            except NonFiniteOutputError:
                check = _not_finite(bundle, graph, case)
            report(check.line())
            checks.append(check)
        del run  # and with it the graph's weights, before the next graph's are loaded
    if manifest.max_len > longest:
        report(f"-[-] lengths above {longest}: not checked; ask for them with --longest {manifest.max_len}")
    for engine in manifest.engines:
        report(f"-[-] {engine.file}: not checked: that needs an NVIDIA GPU")
    return checks


def _why_not_left(manifest: Manifest, reference: Reference) -> str | None:
    """Why padding on the left leaves nothing to compare with; None where it does.

    A classifier of Hugging Face's reads the token at index 0. If that is padding, dense attention gives it a value,
    which counts as an answer; in sparse attention it is undefined, but in Longformer, where it is 0.
    """
    is_sparse = bool(manifest.windows) or manifest.block_sparse is not None
    if manifest.task == Task.TEXT_CLASSIFICATION.value and is_sparse and manifest.global_attention is None:
        return "Hugging Face's classifier reads token 0, and sparse attention sees no padding"
    by_row = manifest.block_sparse is not None and manifest.block_sparse.last_block == "row"
    if by_row and reference.counts_from_padding and not reference.takes_position_ids:
        return "blocks count from each text's first token, and Hugging Face's from the padding, which moves positions"
    return None


def summary(checks: Sequence[Check]) -> dict[str, object]:
    """What the manifest records of a verification."""
    by_graph: dict[str, object] = {}
    for graph in sorted({check.graph for check in checks}):
        of_graph = [check for check in checks if check.graph == graph]
        by_graph[graph] = {
            "checks": len(of_graph),
            "passed": sum(check.passed for check in of_graph),
            "tolerance": of_graph[0].tolerance,
            "max_abs_error": _json_number(max(check.max_abs_error for check in of_graph)),
            "min_cosine": min(check.min_cosine for check in of_graph),
            "tokens": sorted({check.case.tokens for check in of_graph}),
            "failed": [asdict(check.case) for check in of_graph if not check.passed],
        }
    return {"passed": bool(checks) and all(check.passed for check in checks), "graphs": by_graph}


def _json_number(value: float) -> float | None:
    """JSON has no infinity: an output that was not finite has no error."""
    return value if np.isfinite(value) else None


_Run = Callable[[dict[str, IntArray]], dict[str, FloatArray]]


def _runner(bundle: Bundle, graph: GraphFile) -> _Run:
    """Runs one graph: the lowered one as users do, through the runtime; the portable one as it is."""
    if graph.lowering != "portable":
        session = hdruntime.load(bundle, backend="onnxruntime")
        return lambda feeds: session(**feeds)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Every case has its own shape, so remembered memory patterns would only pile up.
    options.enable_mem_pattern = False
    # Its warnings are about missing half-precision kernels, which it works around by itself.
    options.log_severity_level = _ERRORS_ONLY
    portable = onnxruntime.InferenceSession(bundle.file(graph.file), options, providers=["CPUExecutionProvider"])
    inputs = [value.name for value in portable.get_inputs()]
    outputs = [value.name for value in portable.get_outputs()]

    def run(feeds: dict[str, IntArray]) -> dict[str, FloatArray]:
        types = {name: np.zeros_like(feeds["input_ids"]) for name in inputs if name == "token_type_ids"}
        return dict(zip(outputs, portable.run(outputs, feeds | types), strict=True))

    return run


def _scores_bytes(graph: GraphFile, case: Case, manifest: Manifest) -> int:
    """Memory of one layer's attention scores and what is made of them; 0 where they are never materialised."""
    # The lowered graph needs a mask, and with it the scores, only where the runtime cannot cut the padding off.
    if graph.lowering != "portable" and case.padding != "left":
        return 0
    has_dense_layers = any("DenseAttention" in name for name in manifest.attention)
    if not has_dense_layers and graph.lowering != "portable":
        return 0
    return 3 * 4 * case.batch * manifest.num_heads * case.tokens * _reach(case.tokens, manifest, has_dense_layers)


def _reach(tokens: int, manifest: Manifest, has_dense_layers: bool) -> int:
    """Keys that a query meets in the portable graph, about."""
    if has_dense_layers:
        return tokens
    if manifest.block_sparse is None:
        # A block of a window's queries meets the window and about a quarter of it more.
        return min(tokens, 3 * max(manifest.windows))
    blocks = manifest.block_sparse
    # Five blocks and the random ones of each query; two blocks of queries meet all, which is two more of each.
    return min(tokens, (7 + blocks.random_blocks) * blocks.block_size + blocks.global_tokens)


def _expected(case: Case, reference: Reference, manifest: Manifest) -> list[dict[str, FloatArray]]:
    """PyTorch's outputs for each row's text alone: padding must change nothing but the positions it shifts.

    PyTorch is asked about the padded batch where nothing else would do: blocks may be those of the batch; with padding
    on the left a classifier of Hugging Face's reads the token at index 0, even where that is padding, and some models
    take no position ids.
    """
    by_batch = manifest.block_sparse is not None and manifest.block_sparse.last_block == "padded"
    shifted = case.padding == "left" and reference.positions_shift and not reference.takes_position_ids
    reads_first = case.padding == "left" and reference.task is Task.TEXT_CLASSIFICATION
    if (by_batch and case.padding != "none") or shifted or reads_first:
        return _expected_padded(case, reference)
    return [
        reference.unpadded(row, length, shift=case.tokens - length if case.padding == "left" else 0)
        for row, length in enumerate(case.lengths)
    ]


def _expected_padded(case: Case, reference: Reference) -> list[dict[str, FloatArray]]:
    """PyTorch's outputs for each row of the padded batch, which it is given one by one: memory is one row's."""
    from hdexport.heads import OUTPUTS_OF_TASK

    inputs, axes = _padded_batch(case, reference), OUTPUTS_OF_TASK[reference.task]
    rows = []
    for row, length in enumerate(case.lengths):
        outputs = reference.batch({name: array[row : row + 1] for name, array in inputs.items()})
        rows.append({
            name: values[0, case.real(length)] if "tokens" in axes[name] else values[0]
            for name, values in outputs.items()
        })  # fmt: skip
    return rows


def _not_finite(bundle: Bundle, graph: GraphFile, case: Case) -> Check:
    """The outcome where the runtime refused to hand out what the graph gave."""
    failed = Comparison(max_abs_error=float("inf"), min_cosine=-1.0, passed=False, tolerance="finite values")
    return Check(graph=graph.file, case=case, outputs={spec.name: failed for spec in bundle.manifest.outputs})


def _check(
    bundle: Bundle,
    graph: GraphFile,
    case: Case,
    expected: list[dict[str, FloatArray]],
    got: dict[str, FloatArray],
) -> Check:
    half_precision = bundle.manifest.dtype != "float32"
    outputs = {}
    for spec in bundle.manifest.outputs:
        found = []
        for row, length in enumerate(case.lengths):
            actual = got[spec.name][row]
            if "tokens" in spec.shape:
                actual = actual[case.real(length)]
            # Scores without a feature axis ([batch, tokens]) are compared as one vector a row.
            pair = np.atleast_2d(actual), np.atleast_2d(expected[row][spec.name])
            found.append(compare(*pair, half_precision=half_precision))
        outputs[spec.name] = Comparison(
            max_abs_error=max(result.max_abs_error for result in found),
            min_cosine=min(result.min_cosine for result in found),
            passed=all(result.passed for result in found),
            tolerance=found[0].tolerance,
        )
    return Check(graph=graph.file, case=case, outputs=outputs)


def _padded_batch(case: Case, reference: Reference) -> dict[str, IntArray]:
    """The inputs, [batch, tokens] each.

    On the right padding holds ordinary ids, for whatever stands there must not matter. On the left it holds the
    padding id, from which models of RoBERTa's kind number their positions.
    """
    filler = (
        np.full(case.tokens, reference.pad_token_id, np.int64)
        if case.padding == "left"
        else reference.text(case.batch, case.tokens)
    )
    input_ids = np.tile(filler, (case.batch, 1))
    attention_mask, global_tokens = np.zeros_like(input_ids), np.zeros_like(input_ids)
    for row, length in enumerate(case.lengths):
        real = case.real(length)
        input_ids[row, real] = reference.text(row, length)
        attention_mask[row, real] = 1
        global_tokens[row, real] = reference.global_tokens(length)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    return inputs | ({"global_attention_mask": global_tokens} if reference.has_global_attention else {})
