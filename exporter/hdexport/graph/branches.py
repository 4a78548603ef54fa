"""Lengths at which a model's Python code takes another branch than in the trace; a graph has the trace's branch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from hdruntime.errors import ExportError

_CHECKED_BATCHES = (1, 3)
"""Batch sizes of a full verification, as in `hdexport.verify.grid`; the trace has another one."""

_LARGEST_BATCH = 64
"""Largest batch size that is checked; no known code distinguishes larger ones."""


def lengths_of_branches(program: ExportedProgram, ids: int, *, max_len: int) -> tuple[int, ...]:
    """Lengths of 2 to `max_len` tokens at which the code's comparisons of the number of tokens differ from the trace.

    The result has the first and the last such length of each comparison: the graph may be wrong there. A length of 1 is
    in every verification. An ExportError says that the code distinguishes batches larger than those of a verification.

    Args:
        program: the traced program.
        ids: index of an input with the axes batch and tokens.
        max_len: maximum number of tokens.
    """
    name = program.graph_signature.user_inputs[ids]
    sizes = next(node.meta["val"].shape for node in program.graph.nodes if node.name == name)
    if not all(isinstance(size, torch.SymInt) for size in sizes):
        return ()  # a frozen axis: `trace` rejects it by name
    batch, tokens = (size.node.expr for size in sizes)
    lengths: set[int] = set()
    for condition in _conditions(program, sizes[0].node.shape_env, (batch, tokens)):
        symbols = condition.free_symbols
        if symbols == {batch}:
            _check_batches(condition, batch)
        elif symbols and symbols <= {batch, tokens}:
            for rows in _CHECKED_BATCHES if batch in symbols else (1,):
                fails = [n for n in range(2, max_len + 1) if not _holds(condition, {batch: rows, tokens: n})]
                lengths.update(fails[:1], fails[-1:])
    return tuple(sorted(lengths))


def _conditions(program: ExportedProgram, environment: Any, symbols: Iterable[Any]) -> set[Any]:
    """Conditions on sizes that held in the trace, as SymPy expressions."""
    asserted = itertools.chain.from_iterable(environment.deferred_runtime_asserts.values())
    conditions = {assumed.expr.xreplace(environment.replacements) for assumed in asserted}
    for symbol in symbols:
        bounds = program.range_constraints.get(symbol)
        if bounds is not None:
            conditions |= {symbol >= bounds.lower, symbol <= bounds.upper}
    return conditions


def _holds(condition: Any, sizes: dict[Any, int]) -> bool:
    return bool(sympy_interp(PythonReferenceAnalysis, sizes, condition))


def _check_batches(condition: Any, batch: Any) -> None:
    failing = next((rows for rows in range(1, _LARGEST_BATCH + 1) if not _holds(condition, {batch: rows})), None)
    if failing is not None and all(_holds(condition, {batch: rows}) for rows in _CHECKED_BATCHES):
        raise ExportError(
            f"The model's code takes another branch for batches of {failing} rows than for smaller batches; a graph "
            "has one branch for all batches.",
            hint="Change the code so that it does not compare the batch size.",
        )
