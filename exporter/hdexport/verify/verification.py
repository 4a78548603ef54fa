"""Every graph and engine of a bundle against PyTorch, one case at a time: no answer outlives its case."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from hdexport.attention.attention_type import DISCRETE_OUTPUT, Boundaries
from hdexport.attention.registry import attention_of
from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.targets.target import Changes
from hdexport.graph.vocabulary_head import SAMPLED_TOKENS
from hdexport.model.task import TASKS
from hdexport.support.check import Check
from hdexport.support.progress import Progress
from hdexport.verify.case_memory import arrays_bytes, scores_bytes
from hdexport.verify.checks import Losses, Verification, compare_case, not_compared, own_losses_of, problem_of
from hdexport.verify.comparison import HALF_COSINE, LEAST_COSINE
from hdexport.verify.expected import StoredRows, expected_rows, left_padding_skip, padded_batch, sampled_tokens
from hdexport.verify.float32_session import MAX_COPIES_BYTES
from hdexport.verify.graph_sets import GraphSet, gpu_sets, graph_sets, opened
from hdexport.verify.grid import LONGEST_CHECKED, Grid, cases, within
from hdexport.verify.operations import longest_within, matmul_weights, operations
from hdexport.verify.parts_run import opened_in_parts
from hdexport.verify.pytorch_reference import Reference
from hdexport.verify.single_texts import ENGLISH, sample_ids
from hdexport.verify.temporary_outputs import temporary_outputs
from hdruntime.arrays import AnyArray, IntArray
from hdruntime.backends.cpu_runner import give_memory_back
from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import needs_gpu
from hdruntime.bundle.manifest import Backend, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.task_formats import format_of
from hdruntime.bundle.verification import Case, Skip, SkipCause
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendError, BundleError, Message, NonFiniteOutputError
from hdruntime.process_limits import free_bytes

if TYPE_CHECKING:
    from hdexport.graph.targets.target import Run

_QUICK_LIMIT_BYTES = 512 * 2**20
"""Memory that a case of the quick grid may take besides the weights: touching more for the first time takes seconds.
With the full grid it is half of the free memory."""

_QUICK_OPERATIONS = 1.2e11
"""Floating-point operations of the quick grid's longest row, in each graph and in PyTorch: about a second on one core.
A longer row would take more of a build's time than its trace."""

_PART_BYTES = 2**29
"""Bytes of the weights of a part."""

_MAX_SURE_TOKENS = 1024
"""The quick grid compares sequences of up to this many tokens or two past the checkpoint's positions, whatever they
take."""

_INFORMATION_TOKENS = 1024
"""Tokens of the text that shows how good an attention is."""

_WRITTEN_TOKENS = 16_384
"""Tokens that the texts for int8 graphs are cut from."""


def verify_bundle(
    bundle: Bundle,
    reference: Reference,
    *,
    grid: Grid,
    precisions: Collection[Precision] | None = None,
    backend: Backend | None = None,
    longest: int = LONGEST_CHECKED,
    limit_bytes: int | None = None,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run every graph and engine of a bundle that runs here over a grid, and compare it with PyTorch.

    Where the logits over a vocabulary do not fit in the memory, they are compared at some tokens, and the states that
    they are projected from at all tokens. If those do not fit either, they are not checked. Both are reported.

    Args:
        bundle: the bundle.
        reference: PyTorch's answers.
        grid: the cases.
        precisions: that sessions on a CPU compute in, each with tolerances of its own; None for the precisions that
            `graph_sets` chooses, and for graphs that run on a GPU.
        backend: the only one that is compared; None for each that runs here.
        longest: maximum length in tokens; longer cases are skipped.
        limit_bytes: memory that a case may take besides the weights; None for the grid's default.
        memory_bytes: memory that the weights of a session on a CPU may take; None for the free memory less a fifth.
        progress: takes each outcome, and the number of cases that are done.

    Returns:
        all outcomes; the bundle is right where all have passed.

    Raises:
        BackendUnavailableError: the backend that was asked for cannot run here, or not this bundle.
    """
    manifest = bundle.manifest
    progress = progress or Progress()
    outcomes = _Outcomes(progress)
    cases_of_grid = _cases(bundle, reference, grid, longest, outcomes)
    asks_gpu = backend is not None and needs_gpu(backend)
    sets = [] if asks_gpu else graph_sets(manifest, backend, precisions, outcomes.skip)
    if precisions is None and (backend is None or asks_gpu):
        sets += gpu_sets(bundle, backend, outcomes.skip)
    shows_decisions = reference.properties.discrete_outputs is not None
    if shows_decisions:
        sets = list(_that_show_decisions(sets, outcomes))
    memory_bytes = memory_bytes or _free_bytes() * 4 // 5
    sets = list(_that_fit(bundle, sets, outcomes, memory_bytes, may_cut=not shows_decisions))
    if limit_bytes is None:
        limit_bytes = _QUICK_LIMIT_BYTES if grid is Grid.QUICK else _free_bytes() // 2
    count = _Count(progress, len(sets) * len(cases_of_grid))
    for reader, those in _readers(bundle, reference, sets):
        for is_sampled, group in _by_logits(cases_of_grid, manifest, limit_bytes).items():
            _compare(bundle, reader, group, those, outcomes, count, limit_bytes, is_sampled=is_sampled)
    return Verification(
        grid=grid,
        checks=tuple(outcomes.checks),
        skipped=tuple(outcomes.skipped),
        information=(*outcomes.information, *_information(bundle, reference)),
        # Rounding explains no failure of a check that compares by float32's tolerance.
        hints=tuple(outcomes.hints)
        if all(check.passed or check.tolerance.atol is None for check in outcomes.checks)
        else (),
    )


def _cases(bundle: Bundle, reference: Reference, grid: Grid, longest: int, outcomes: _Outcomes) -> list[Case]:
    """The cases of a grid without those that nothing can be compared with, or that take too long."""
    manifest = bundle.manifest
    boundaries = list(_boundaries(manifest))
    chosen = cases(grid, manifest.positions.base, manifest.max_len, boundaries=boundaries, longest=longest)
    skip = left_padding_skip(manifest, reference)
    if skip is not None:
        chosen = [case for case in chosen if case.padding != "left"]
        outcomes.skip(skip)
    if manifest.max_len > longest:
        outcomes.skip(Skip(cause=SkipCause.MAX_LENGTH, needed=manifest.max_len, limit=longest))
    if grid is Grid.FULL:
        return chosen
    whole = _longest_quick(bundle)
    chosen, longer = within(chosen, whole)
    for case in longer:
        outcomes.skip(Skip(cause=SkipCause.OPERATIONS, case=case, limit=whole))
    return chosen


def _longest_quick(bundle: Bundle) -> int:
    """Tokens of the longest case of the quick grid."""
    manifest = bundle.manifest
    graph = next((graph for graph in manifest.graphs if graph.lowering == PORTABLE_LOWERING), manifest.graphs[0])
    weights = matmul_weights(read_graph(bundle, graph).graph)
    affordable = longest_within(
        manifest.max_len, lambda tokens: operations(manifest, weights, tokens) / _QUICK_OPERATIONS
    )
    return max(affordable, min(manifest.positions.base + 2, _MAX_SURE_TOKENS))


def _by_logits(cases_of_grid: Iterable[Case], manifest: Manifest, limit_bytes: int) -> dict[bool, list[Case]]:
    """Whether logits are compared at some tokens only -> the cases, the short ones first."""
    groups: dict[bool, list[Case]] = {}
    # A number for each id of the vocabulary at every token.
    is_large = any({"tokens", "vocab_size"} <= {*axes} for axes in format_of(manifest.task).output_axes.values())
    for case in cases_of_grid:
        groups.setdefault(is_large and arrays_bytes(case, manifest) > limit_bytes, []).append(case)
    return groups


def _readers(
    bundle: Bundle, reference: Reference, sets: Sequence[GraphSet]
) -> Iterator[tuple[Reference, list[GraphSet]]]:
    """Graphs with the reference that checks them: int8 graphs on texts like the calibration's, real ones if possible.

    Random ids have activations outside of the calibrated ranges, which says how rare such texts are and not whether
    graphs are right; but they show most mistakes of float graphs, because every token differs.
    """
    rounded = [each for each in sets if each.precision is Precision.INT8]
    exact = [each for each in sets if each not in rounded and not each.is_on_gpu]
    on_gpu = [each for each in sets if each.is_on_gpu]
    for those in (exact, on_gpu):
        if those:
            yield reference, those
    if rounded:
        (written,), kind = sample_ids(bundle, [_WRITTEN_TOKENS])
        yield (reference.reading(written) if kind == ENGLISH else reference), rounded


def _that_fit(
    bundle: Bundle, sets: Iterable[GraphSet], outcomes: _Outcomes, memory_bytes: int, *, may_cut: bool
) -> Iterator[GraphSet]:
    """The sets whose weights fit in the memory, whole or in parts."""
    for graphs in sets:
        if graphs.is_on_gpu:
            yield graphs
            continue
        needed, whole_bytes = graphs.target.weight_bytes(bundle, graphs.precision), memory_bytes
        is_cut = may_cut and graphs.target.runs_parts and graphs.precision is Precision.FLOAT32
        if is_cut and bundle.manifest.stores_half_weights:
            whole_bytes = min(whole_bytes, MAX_COPIES_BYTES)
        if needed <= whole_bytes:
            yield graphs
        elif is_cut:
            yield dataclasses.replace(graphs, part_bytes=min(_PART_BYTES, memory_bytes))
        else:
            outcomes.skip(Skip(cause=SkipCause.WEIGHTS, graph=graphs.name, needed=needed, limit=memory_bytes))


def _that_show_decisions(sets: Iterable[GraphSet], outcomes: _Outcomes) -> Iterator[GraphSet]:
    for graphs in sets:
        if graphs.precision is not Precision.FLOAT32:
            outcomes.skip(Skip(cause=SkipCause.HIDDEN_DECISIONS, graph=graphs.name))
        else:
            yield graphs


def _information(bundle: Bundle, reference: Reference) -> Iterator[str]:
    if reference.properties.information is None:
        return
    import torch

    (text,), kind = sample_ids(bundle, [min(bundle.manifest.max_len, _INFORMATION_TOKENS)])
    for measured in reference.properties.information(torch.from_numpy(text)[None]):
        yield f"{measured} ({kind} of {len(text)} tokens)"


def _boundaries(manifest: Manifest) -> Iterator[Boundaries]:
    """Branches of the model's code, boundaries of attention, chunks of feed-forward networks, blocks of pooled tokens
    and the scale of queries. The last is for a model whose table is longer than it was trained; the grid has the
    checkpoint's own limit."""
    for tokens in manifest.branches:
        yield Boundaries(
            lengths=frozenset({tokens - 1, tokens, tokens + 1}), first=tokens, second=tokens + 1, alone=True
        )
    for item in attention_of(manifest):
        boundaries = item.type.boundaries(item.record)
        if boundaries is not None:
            yield boundaries
    chunk = manifest.ffn_chunk
    if chunk is not None:
        yield Boundaries(lengths=frozenset({chunk, chunk + 1, 2 * chunk + 1}), first=chunk, second=chunk + 1)
    if TASKS[manifest.task].pools_logits:
        # Passes import onnx_ir, which takes longer than all else here.
        from hdexport.graph.passes.pool_in_blocks import BLOCK_TOKENS

        lengths = frozenset({BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 1})
        yield Boundaries(lengths=lengths, first=BLOCK_TOKENS, second=BLOCK_TOKENS + 1)
    trained = manifest.positions.trained
    if manifest.positions.attention_scale != "none" and trained is not None and trained != manifest.positions.base:
        lengths = frozenset({trained - 1, trained, trained + 1, 2 * trained})
        yield Boundaries(lengths=lengths, first=trained + 1, second=2 * trained)


class _Outcomes:
    """The outcomes; each is reported at once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.checks: list[Check] = []
        self.skipped: list[Skip] = []
        self.information: list[str] = []
        self.hints: list[Message] = []

    def add(self, check: Check) -> None:
        self.checks.append(check)
        self._progress.check(check)

    def skip(self, skip: Skip) -> None:
        self.skipped.append(skip)
        self._progress.check(skip)


def _free_bytes() -> int:
    return free_bytes() or 2 * _QUICK_LIMIT_BYTES


class _Count:
    """The number of cases that are done, for the progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self._done, self._total = progress, 0, total

    def step(self) -> None:
        self.progress.detail("checks", self._done, self._total)
        self._done += 1


def _compare(
    bundle: Bundle,
    reference: Reference,
    cases_of_group: Sequence[Case],
    sets: Sequence[GraphSet],
    outcomes: _Outcomes,
    count: _Count,
    limit_bytes: int,
    *,
    is_sampled: bool,
) -> None:
    """Runs PyTorch once a case, and then each graph over all cases.

    The weights of one model are in memory at a time: PyTorch's outputs wait on the disk. Where PyTorch follows the
    decisions of a graph, it runs beside the graph.
    """
    manifest = bundle.manifest
    samples = {case: sampled_tokens(case, manifest.positions.base) if is_sampled else None for case in cases_of_group}
    fitting = {graphs: list(_fitting(graphs, samples, manifest, outcomes, limit_bytes)) for graphs in sets}
    changes = Changes(reference.properties.discrete_outputs, is_sampled)
    with temporary_outputs("hdexport-verify-") as directory:
        expected = StoredRows(directory)

        def run_cases(
            graphs: GraphSet, those: Iterable[Case], own_losses: Mapping[Case, Losses] = MappingProxyType({})
        ) -> Iterator[Check]:
            if len(graphs.graphs) > 1:
                # Batches without padding first: a session may change its graph once.
                those = sorted(those, key=lambda case: case.padding != "none" or case.tokens == 1)

            def batches() -> Iterator[dict[str, AnyArray]]:
                return (_feeds(case, reference, samples[case]) for case in those)

            with contextlib.ExitStack() as stack:
                if graphs.part_bytes is None:
                    run, parts = stack.enter_context(opened(bundle, graphs, changes))
                else:
                    run, parts = stack.enter_context(opened_in_parts(bundle, graphs, changes, batches, count.progress))
                for case in those:
                    if not own_losses:
                        count.step()
                    if run is None:
                        needed = arrays_bytes(case, manifest)
                        outcomes.skip(_memory_skip(graphs, case, needed=needed, limit_bytes=limit_bytes))
                        continue
                    own = own_losses.get(case, {})
                    check = _compared(graphs, run, case, reference, manifest, expected, samples[case], own)
                    yield dataclasses.replace(check, parts=parts)

        doubtful: dict[GraphSet, dict[Case, Check]] = {}
        if reference.properties.discrete_outputs is None:
            for case in dict.fromkeys(case for those in fitting.values() for case in those):
                expected.write(case, expected_rows(case, reference, manifest, samples=samples[case]))
            reference.release()
        for graphs, those in fitting.items():
            for check in run_cases(graphs, those) if those else ():
                if _may_be_the_models(graphs, check, manifest):
                    doubtful.setdefault(graphs, {})[check.case] = check
                else:
                    outcomes.add(check)
            # A session is freed when nothing refers to its run.
            give_memory_back()
        if not doubtful:
            return
        failed = dict.fromkeys(case for checks in doubtful.values() for case in checks)
        own_losses = _own_losses(reference, manifest, {case: samples[case] for case in failed}, expected, outcomes)
        for graphs, checks in doubtful.items():
            for check in run_cases(graphs, checks, own_losses) if own_losses else checks.values():
                outcomes.add(check)
            give_memory_back()


def _may_be_the_models(graphs: GraphSet, check: Check, manifest: Manifest) -> bool:
    """Whether a check in bfloat16 failed by values that PyTorch, in bfloat16, may be as far from."""
    is_bfloat16 = graphs.precision is Precision.BFLOAT16 or (graphs.is_on_gpu and manifest.dtype == "bfloat16")
    return is_bfloat16 and bool(check.failed_outputs) and check.error is None and not check.wrong_decisions


def _own_losses(
    reference: Reference,
    manifest: Manifest,
    samples: Mapping[Case, IntArray | None],
    expected: StoredRows,
    outcomes: _Outcomes,
) -> dict[Case, Losses]:
    """Case -> what PyTorch loses in bfloat16; none if it does not run so."""
    rounded = reference.in_bfloat16()
    losses: dict[Case, Losses] = {}
    try:
        for case, tokens in samples.items():
            rows = expected_rows(case, rounded, manifest, samples=tokens)
            losses[case] = own_losses_of(manifest, expected.read(case), rows)
    except MemoryError:
        raise
    except Exception as error:  # a model's code need not take bfloat16
        outcomes.information.append(f"PyTorch does not run this model in bfloat16: {problem_of(error)}")
        return {}
    finally:
        rounded.release()
    largest = max(loss for of_case in losses.values() for loss in of_case.values())
    outcomes.information.append(
        f"PyTorch in bfloat16, cases beyond cosine {HALF_COSINE}: {len(losses)}, smallest cosine {1 - largest:.5f}"
    )
    if largest > 1 - LEAST_COSINE:
        outcomes.hints.append("This model loses too much in bfloat16, in PyTorch as well: compute in float32.")
    return losses


def _fitting(
    graphs: GraphSet,
    samples: Mapping[Case, IntArray | None],
    manifest: Manifest,
    outcomes: _Outcomes,
    limit_bytes: int,
) -> Iterator[Case]:
    """The cases that an engine takes, and whose arrays fit in the memory."""
    for case, tokens in samples.items():
        if graphs.longest is not None and case.tokens > graphs.longest:
            outcomes.skip(Skip(cause=SkipCause.ENGINE_PROFILE, graph=graphs.name, case=case, limit=graphs.longest))
            continue
        needed = arrays_bytes(case, manifest, samples=None if tokens is None else len(tokens))
        needed += scores_bytes(graphs, case, manifest, cuts_padding=tokens is None)
        if needed > limit_bytes:
            outcomes.skip(_memory_skip(graphs, case, needed=needed, limit_bytes=limit_bytes))
        else:
            yield case


def _memory_skip(graphs: GraphSet, case: Case, *, needed: int, limit_bytes: int) -> Skip:
    return Skip(cause=SkipCause.MEMORY, graph=graphs.name, case=case, needed=needed, limit=limit_bytes)


def _feeds(case: Case, reference: Reference, samples: IntArray | None) -> dict[str, AnyArray]:
    return padded_batch(case, reference) | ({} if samples is None else {SAMPLED_TOKENS: samples})


def _compared(
    graphs: GraphSet,
    run: Run,
    case: Case,
    reference: Reference,
    manifest: Manifest,
    expected: StoredRows,
    samples: IntArray | None,
    own_losses: Losses,
) -> Check:
    """Runs graphs, and PyTorch where it follows their decisions. Nothing outlives the call."""
    try:
        outputs = run(_feeds(case, reference, samples))
    except NonFiniteOutputError:
        return not_compared(graphs, case, manifest)
    except MemoryError:
        raise
    except Exception as error:
        is_of_engine = graphs.is_on_gpu and isinstance(error, (BackendError, BundleError))
        # A trace of unknown code may hold sizes of the traced text, which fail in a library's own way.
        if not reference.checkpoint.family.is_generic and not is_of_engine:
            raise
        return not_compared(graphs, case, manifest, problem_of(error))
    discrete_outputs = reference.properties.discrete_outputs
    if discrete_outputs is None:
        return compare_case(graphs, case, manifest, expected.read(case), outputs, samples, own_losses=own_losses)
    decided = [np.asarray(values, np.int64) for name, values in outputs.items() if name.startswith(DISCRETE_OUTPUT)]
    followed = expected_rows(case, reference, manifest, samples=samples, decisions=decided)
    return compare_case(graphs, case, manifest, followed, outputs, samples, discrete_outputs.take_wrong())
