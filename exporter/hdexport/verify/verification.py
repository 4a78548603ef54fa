"""Every graph of a bundle against PyTorch, one case at a time: no answer outlives its case."""

from __future__ import annotations

__all__ = ["verify_bundle"]

import contextlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from hdexport.attention.kind import DECISION, Boundaries
from hdexport.attention.kinds import attention_of
from hdexport.graph.vocabulary_head import SAMPLED_TOKENS
from hdexport.model.tasks import Task
from hdexport.support.memory import free_bytes
from hdexport.verify.case_memory import arrays_bytes, scores_bytes
from hdexport.verify.checks import Check, Verification, case_text, compare_case, not_finite
from hdexport.verify.expected import expected_rows, padded_batch, sampled_tokens, why_not_left
from hdexport.verify.graph_runners import Run, runner, sampled_runner
from hdexport.verify.grid import LONGEST_CHECKED, Case, Grid, cases
from hdexport.verify.pytorch_reference import Reference
from hdexport.verify.sample_text import sample_ids
from hdruntime.bundle.manifest import GraphFile, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import CUDA_LOWERING
from hdruntime.errors import NonFiniteOutputError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_QUICK_LIMIT_BYTES = 512 * 2**20
"""Memory that a case of the quick grid may take besides the weights: the first touch of more takes seconds. With the
full grid it is half of what is free."""

_INFORMATION_TOKENS = 1024
"""Of the text that shows how good an attention is."""


def verify_bundle(
    bundle: Bundle,
    reference: Reference,
    *,
    grid: Grid,
    longest: int = LONGEST_CHECKED,
    limit_bytes: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Run every graph of a bundle over a grid and compare it with PyTorch.

    Where the logits over a vocabulary do not fit in the memory, they are compared at some tokens, and what they are
    projected from at all of them. What does not fit either is not checked. Both are said.

    Args:
        bundle: the bundle.
        reference: PyTorch's answers.
        grid: the cases.
        longest: lengths above it are left out.
        limit_bytes: memory that a case may take besides the weights; None for what suits the grid.
        report: called with one line per check, and per thing that is not checked.

    Returns:
        all outcomes; the bundle is right where all have passed.
    """
    manifest = bundle.manifest
    outcomes = _Outcomes(report)
    boundaries = list(_boundaries(manifest))
    found = cases(grid, manifest.positions.base, manifest.max_len, boundaries=boundaries, longest=longest)
    reason = why_not_left(manifest, reference)
    if reason is not None:
        found = [case for case in found if case.padding != "left"]
        outcomes.leave_out(f"padding left: not checked: {reason}")
    graphs = _graphs_of_cpus(manifest, outcomes)
    if limit_bytes is None:
        limit_bytes = _limit_bytes(grid)
    can_be_sampled = manifest.task == Task.FILL_MASK.value
    sampled = [case for case in found if can_be_sampled and arrays_bytes(case, manifest) > limit_bytes]
    whole = [case for case in found if case not in sampled]
    for group, open_run in ((whole, runner), (sampled, sampled_runner)):
        with contextlib.ExitStack() as stack:
            # The graphs of one group at a time: each holds a copy of the weights.
            decisions = reference.facts.decisions
            runs = {graph: stack.enter_context(open_run(bundle, graph, decisions)) for graph in graphs if group}
            for case in group:
                _check_case(bundle, reference, case, runs, outcomes, limit_bytes, is_sampled=group is sampled)
    if manifest.max_len > longest:
        outcomes.leave_out(f"lengths above {longest}: not checked; ask for them with --longest {manifest.max_len}")
    for engine in manifest.engines:
        outcomes.leave_out(f"{engine.file}: not checked: that needs an NVIDIA GPU")
    return Verification(
        grid=grid,
        checks=tuple(outcomes.checks),
        not_checked=tuple(outcomes.not_checked),
        information=tuple(_information(bundle, reference, report)),
    )


def _information(bundle: Bundle, reference: Reference, report: Callable[[str], None]) -> Iterator[str]:
    if reference.facts.information is None:
        return
    import torch

    (text,), kind = sample_ids(bundle, [min(bundle.manifest.max_len, _INFORMATION_TOKENS)])
    for found in reference.facts.information(torch.from_numpy(text)[None]):
        line = f"    {found} ({kind} of {len(text)} tokens)"
        report(line)
        yield line


def _boundaries(manifest: Manifest) -> Iterator[Boundaries]:
    """Those of attention, where feed-forward networks get a second chunk, and where queries begin to be scaled.

    The last is for a model whose table is longer than it was trained; the grid has the checkpoint's own limit.
    """
    for item in attention_of(manifest):
        found = item.kind.boundaries(item.record)
        if found is not None:
            yield found
    chunk = manifest.ffn_chunk
    if chunk is not None:
        yield Boundaries(lengths=frozenset({chunk, chunk + 1, 2 * chunk + 1}), first=chunk, second=chunk + 1)
    trained = manifest.positions.trained
    if manifest.positions.attention_scale != "none" and trained is not None and trained != manifest.positions.base:
        lengths = frozenset({trained - 1, trained, trained + 1, 2 * trained})
        yield Boundaries(lengths=lengths, first=trained + 1, second=2 * trained)


class _Outcomes:
    """What is found; each finding is reported at once."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.checks: list[Check] = []
        self.not_checked: list[str] = []

    def add(self, check: Check) -> None:
        self.checks.append(check)
        self._report(check.line())

    def leave_out(self, what: str) -> None:
        self.not_checked.append(what)
        self._report(f"-[-] {what}")


def _graphs_of_cpus(manifest: Manifest, outcomes: _Outcomes) -> list[GraphFile]:
    graphs = []
    for graph in manifest.graphs:
        if graph.lowering == CUDA_LOWERING:
            outcomes.leave_out(f"{graph.file}: not checked: that needs an NVIDIA GPU")
        elif graph.dtype == "bfloat16":
            outcomes.leave_out(f"{graph.file}: not checked: ONNX Runtime has no bfloat16 on a CPU")
        else:
            graphs.append(graph)
    return graphs


def _limit_bytes(grid: Grid) -> int:
    if grid is Grid.QUICK:
        return _QUICK_LIMIT_BYTES
    return (free_bytes() or 2 * _QUICK_LIMIT_BYTES) // 2


def _check_case(
    bundle: Bundle,
    reference: Reference,
    case: Case,
    runs: Mapping[GraphFile, Run | None],
    outcomes: _Outcomes,
    limit_bytes: int,
    *,
    is_sampled: bool,
) -> None:
    """Run PyTorch once and each graph; no answer outlives the call."""
    manifest = bundle.manifest
    samples = sampled_tokens(case, manifest.positions.base) if is_sampled else None
    arrays = arrays_bytes(case, manifest, samples=None if samples is None else len(samples))
    fitting: list[tuple[GraphFile, Run]] = []
    for graph, run in runs.items():
        needed = arrays + scores_bytes(graph, case, manifest, is_sampled=is_sampled)
        if run is None:
            needed = arrays_bytes(case, manifest)
        if run is None or needed > limit_bytes:
            outcomes.leave_out(
                f"{graph.file}: {case_text(case)}: not checked: outputs and attention scores take "
                f"{needed / 2**30:.2g} GiB, more than {limit_bytes / 2**30:.2g} GiB"
            )
        else:
            fitting.append((graph, run))
    if not fitting:
        return
    expected = None
    if reference.facts.decisions is None:
        expected = expected_rows(case, reference, manifest, samples=samples)
    feeds = padded_batch(case, reference) | ({} if samples is None else {SAMPLED_TOKENS: samples})
    for graph, run in fitting:
        outcomes.add(_compared(graph, run, case, feeds, reference, manifest, expected, samples))


def _compared(
    graph: GraphFile,
    run: Run,
    case: Case,
    feeds: Mapping[str, IntArray],
    reference: Reference,
    manifest: Manifest,
    expected: list[dict[str, FloatArray]] | None,
    samples: IntArray | None,
) -> Check:
    """Run one graph; PyTorch follows its decisions where no answers are given. Nothing outlives the call."""
    try:
        outputs = run(feeds)
    except NonFiniteOutputError:
        return not_finite(graph.file, case, manifest)
    if expected is not None:
        return compare_case(graph.file, case, manifest, expected, outputs, samples)
    decisions = reference.facts.decisions
    assert decisions is not None
    decided = [np.asarray(values, np.int64) for name, values in outputs.items() if name.startswith(DECISION)]
    followed = expected_rows(case, reference, manifest, samples=samples, decisions=decided)
    return compare_case(graph.file, case, manifest, followed, outputs, samples, decisions.take_wrong())
