"""Whether the values of a float16 bundle fit float16: on a CPU, ONNX Runtime computes in float32, which hides it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from hdexport.attention.registry import attention_of
from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.passes.watch_magnitudes import Watched, WatchMagnitudes
from hdexport.verify.operations import longest_within, matmul_weights, operations
from hdexport.verify.single_texts import sample_ids, single_text_runner
from hdruntime.arrays import IntArray
from hdruntime.bundle.manifest import Fp16Overflow, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import Setting, VerificationError

logger = logging.getLogger(__name__)


_LIMIT = 65504.0
"""Float16's largest number."""

_CLOSE = 0.25
"""From this part of the limit on a value is close to it: other texts may have larger values."""

_SHORT_TOKENS = 32

_MAX_OPERATIONS = 2.5e11
"""Floating-point operations for the longest text: a second or two on two cores."""

_MOST_BYTES = 256 * 2**20
"""Memory of the largest value that the longest text may make."""

_INFINITE = 0x7C00
"""Bits of float16's infinity; the bits of NaN are more."""

_SLICE = 2**22
"""Weights that are looked at in one go."""

_HINT = ("Build with ", Setting("precision", "bfloat16", command="build"), ", which has the range of float32.")


class OverflowCheck(NamedTuple):
    """The result of a check: the manifest's record, None unless the bundle is float16, and the problem, None where all
    values fit."""

    record: Fp16Overflow | None = None
    problem: str | None = None

    def require_passed(self) -> None:
        """Raise a VerificationError where a value does not fit."""
        if self.problem is not None:
            raise VerificationError(self.problem, hint=_HINT)


def check_fp16_overflow(bundle: Bundle) -> OverflowCheck:
    """Looks at every value that a GPU would hold in float16, on text. The portable graph runs in float32, on one
    unpadded text at a time: a short one, one of the checkpoint's length, and the longest that takes a second or two. It
    warns about values close to the limit."""
    manifest = bundle.manifest
    graph = next((graph for graph in manifest.graphs if graph.lowering == PORTABLE_LOWERING), None)
    if graph is None or graph.dtype != "float16":
        return OverflowCheck()
    model = read_graph(bundle, graph)
    longest = _longest(manifest, model.graph)
    lengths = {min(tokens, longest) for tokens in (_SHORT_TOKENS, manifest.positions.base, manifest.max_len)}
    texts, kind = sample_ids(bundle, sorted(lengths))
    infinite = list(_infinite_weights(model.graph))
    magnitudes = infinite or _magnitudes(bundle, model, texts)
    tokens = tuple(len(text) for text in texts)
    largest = max(magnitudes, key=lambda magnitude: magnitude.largest)
    outside = [magnitude for magnitude in magnitudes if magnitude.largest > _LIMIT]
    on_texts = f"{kind} of {_listed(tokens)} tokens"
    if not outside:
        _warn_if_close(magnitudes, largest)
    record = Fp16Overflow(
        largest=largest.largest if math.isfinite(largest.largest) else None,
        limit=_LIMIT,
        operator=largest.of.operator,
        node=largest.of.node,
        module=largest.of.module,
        tokens=tokens,
        text=kind,
    )
    return OverflowCheck(record=record, problem=_problem(outside, largest, on_texts) if outside else None)


class _Magnitude(NamedTuple):
    """The largest magnitude of a value, over all texts; infinite where it is not finite."""

    of: Watched
    largest: float

    def __str__(self) -> str:
        where = f" of {self.of.module}" if self.of.module else ""
        return f"{self.of.operator} {self.of.node}{where}, magnitude {_number(self.largest)}"


def _problem(outside: Sequence[_Magnitude], largest: _Magnitude, on_texts: str) -> str:
    first, others = outside[0], ""
    if len(outside) > 1:
        others = f" The largest of {len(outside)} such values: {'this one' if largest is first else largest}."
    return (
        f"The model goes beyond float16, which ends at {_LIMIT:,.0f}: on {on_texts} a GPU would make infinity or NaN "
        f"of {first}.{others}"
    )


def _warn_if_close(magnitudes: Sequence[_Magnitude], largest: _Magnitude) -> None:
    close = sum(magnitude.largest > _CLOSE * _LIMIT for magnitude in magnitudes)
    if close:
        logger.warning(
            "Values come close to float16's limit, %s: %d of %d, the largest %s. Other texts may exceed it.\n%s%s%s",
            f"{_LIMIT:,.0f}",
            close,
            len(magnitudes),
            largest,
            *_HINT,
        )


def _longest(manifest: Manifest, graph: ir.Graph) -> int:
    """Tokens of the longest text within `_MAX_OPERATIONS` and `_MOST_BYTES`."""
    weights = matmul_weights(graph)
    values = (output for node in graph for output in node.outputs if output.shape is not None)
    width = max(math.prod(size for size in value.shape or () if isinstance(size, int)) for value in values)
    attention = attention_of(manifest)

    def cost(tokens: int) -> float:
        keys = [keys for item in attention for keys in item.record.keys_of_layers(manifest, tokens)]
        # PyTorch's and ONNX Runtime's dense attention holds no scores.
        met = max((count for count in keys if count < tokens), default=0)
        largest_bytes = 4 * tokens * max(width, manifest.num_heads * met)
        return max(operations(manifest, weights, tokens) / _MAX_OPERATIONS, largest_bytes / _MOST_BYTES)

    return longest_within(manifest.max_len, cost)


def _infinite_weights(graph: ir.Graph) -> Iterator[_Magnitude]:
    """Weights and constants that are infinite or NaN in float16, without the constants that replace masked values."""
    seen = set()
    for node in graph:
        for value in node.inputs if node.op_type != "Where" else ():
            tensor = None if value is None or value in seen else ir.convenience.get_const_tensor(value)
            seen.add(value)
            if tensor is None or tensor.dtype is not ir.DataType.FLOAT16:
                continue
            bits = tensor.numpy().reshape(-1).view(np.uint16)
            slices = (bits[start : start + _SLICE] for start in range(0, len(bits), _SLICE))
            if any(np.any((part & 0x7FFF) >= _INFINITE) for part in slices):
                weight = Watched(output="", node=str(tensor.name), operator="weight", module="")
                yield _Magnitude(of=weight, largest=math.inf)


def _magnitudes(bundle: Bundle, model: ir.Model, texts: Sequence[IntArray]) -> list[_Magnitude]:
    """Magnitudes in the order of the graph; its outputs last, if they are not finite."""
    watching = WatchMagnitudes()
    watching(model)
    watched, sums = watching.watched, watching.sums
    run = single_text_runner(bundle, model)
    outputs = [of.output for of in watched]
    largest = dict.fromkeys(outputs, 0.0)
    not_finite = set()
    for text in texts:
        for name, value in run([*outputs, *sums], text).items():
            if name in largest:
                # NaN cannot be compared.
                largest[name] = max(largest[name], float(value) if np.isfinite(value) else math.inf)
            elif not np.isfinite(value):
                not_finite.add(name)
    magnitudes = [_Magnitude(of=of, largest=largest[of.output]) for of in watched]
    for name, spec in zip(sums, bundle.manifest.outputs, strict=True):
        if name in not_finite:
            output = Watched(output=name, node=spec.name, operator="output", module="")
            magnitudes.append(_Magnitude(of=output, largest=math.inf))
    return magnitudes


def _listed(tokens: Sequence[int]) -> str:
    *others, last = map(str, tokens)
    return f"{', '.join(others)} and {last}" if others else last


def _number(magnitude: float) -> str:
    if not math.isfinite(magnitude):
        return "infinity or NaN"
    return f"{magnitude:,.0f}" if magnitude >= 1000 else f"{magnitude:.4g}"
