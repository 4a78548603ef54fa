"""Where the Python code of a model takes another way than it took in the trace, which a graph cannot do."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from hdruntime.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.export import ExportedProgram

_CHECKED_BATCHES = (1, 3)
"""The batches of a full verification, as `hdexport.verify.grid` has them; the trace has another one."""

_LARGEST_BATCH = 64
"""Up to which a batch is looked at; code that tells larger ones apart has not been seen."""


def lengths_of_branches(program: ExportedProgram, ids: int, *, max_len: int) -> tuple[int, ...]:
    """Lengths up to `max_len` at which the code compares the number of tokens, and the outcome is not the trace's: the
    first and the last of each comparison, but for 1, which every verification has. The graph may be wrong there.

    `ids` is the place among the inputs of one with the axes batch and tokens. Code that only tells larger batches apart
    than a verification has is an ExportError.
    """
    name = program.graph_signature.user_inputs[ids]
    sizes = next(node.meta["val"].shape for node in program.graph.nodes if node.name == name)
    if not all(isinstance(size, torch.SymInt) for size in sizes):
        return ()  # a frozen axis, which is refused by its name
    batch, tokens = (size.node.expr for size in sizes)
    found: set[int] = set()
    for condition in _conditions(program, sizes[0].node.shape_env, (batch, tokens)):
        symbols = condition.free_symbols
        if symbols == {batch}:
            _check_batches(condition, batch)
        elif symbols and symbols <= {batch, tokens}:
            for rows in _CHECKED_BATCHES if batch in symbols else (1,):
                fails = [n for n in range(2, max_len + 1) if not _holds(condition, {batch: rows, tokens: n})]
                found.update(fails[:1], fails[-1:])
    return tuple(sorted(found))


def _conditions(program: ExportedProgram, environment: Any, symbols: Iterable[Any]) -> set[Any]:
    """What held in the trace, about sizes; expressions of SymPy."""
    asserted = itertools.chain.from_iterable(environment.deferred_runtime_asserts.values())
    found = {assumed.expr.xreplace(environment.replacements) for assumed in asserted}
    for symbol in symbols:
        bounds = program.range_constraints.get(symbol)
        if bounds is not None:
            found |= {symbol >= bounds.lower, symbol <= bounds.upper}
    return found


def _holds(condition: Any, sizes: dict[Any, int]) -> bool:
    return bool(sympy_interp(PythonReferenceAnalysis, sizes, condition))


def _check_batches(condition: Any, batch: Any) -> None:
    failing = next((rows for rows in range(1, _LARGEST_BATCH + 1) if not _holds(condition, {batch: rows})), None)
    if failing is not None and all(_holds(condition, {batch: rows}) for rows in _CHECKED_BATCHES):
        raise ExportError(
            f"The model's code takes another way for batches of {failing} texts than for smaller ones; a graph has one "
            "way for all batches.",
            hint="Change the code so that it does not compare the number of texts.",
        )
