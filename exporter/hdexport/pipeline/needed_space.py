"""The memory and the disk space that a build needs, from the sizes of the weights, before any weight is read.

A build is rejected where a lower bound exceeds what is free, and never where it may fit: what a trace, graphs and
sessions take is no part of the bounds. A warning says so where builds of that size took more memory than is free.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from hdexport.checkpoint.weight_sizes import AS_SAFETENSORS, FLOAT32_BYTES, WeightSizes
from hdexport.pipeline.options import BuildOptions
from hdexport.quantize.dynamic import MIN_PARAMETERS
from hdexport.support.progress import warn
from hdruntime.errors import HdexportError, Message, OutOfMemoryError, Setting, joined
from hdruntime.process_limits import free_bytes

logger = logging.getLogger(__package__)

_HALF_BYTES = 2

_BUILD_BYTES = 250_000_000
"""Memory that a build takes beside copies of weights, once PyTorch is loaded: the rise of ``RssAnon`` until the graphs
are written; six layers of Qwen3-Embedding-0.6B's shape with its table, PyTorch 2.13.0, 2026-11-29."""

_MAX_VERIFICATION_BYTES = 900_000_000
"""Memory that the verification of that build takes beside it. Graphs of more weights run in parts."""

_VERIFICATION_BYTES_OF_VALUE = 8
"""Bytes of a weight of a smaller model in the session that takes most memory, in OpenVINO."""


def check_space(sizes: WeightSizes, options: BuildOptions) -> None:
    """Reject a build that cannot fit in the free memory, or whose bundle cannot fit on the disk.

    Raises:
        OutOfMemoryError: copies of the weights take more memory than is free.
        HdexportError: the weights of the bundle take more space than is free at the output.
    """
    needed, free = min_memory(sizes, options), free_bytes()
    if free is not None and needed > free:
        otherwise = f"Use a machine with more than {_size(needed)} of free memory."
        raise OutOfMemoryError(
            f"The build needs at least {_size(needed)} of memory for copies of the weights of {sizes.path}, and "
            f"{_size(free)} are free.",
            hint=joined(*_smaller(sizes, options, min_memory, free), otherwise if sizes.is_mapped else AS_SAFETENSORS),
        )
    needed_on_disk, free_on_disk = min_bundle_bytes(sizes, options), free_disk_bytes(options)
    if needed_on_disk > free_on_disk:
        raise HdexportError(
            f"The bundle needs at least {_size(needed_on_disk)} of disk space, and {_size(free_on_disk)} are free at "
            f"{options.output.resolve().parent}.",
            hint=joined(
                *_smaller(sizes, options, min_bundle_bytes, free_on_disk),
                ("Free some space there, or choose another place with ", Setting("output"), "."),
            ),
        )
    verification = min(_MAX_VERIFICATION_BYTES, _VERIFICATION_BYTES_OF_VALUE * sizes.total)
    usual = needed + _BUILD_BYTES + verification
    if free is not None and options.verify is not None and usual > free:
        problem = (
            f"Builds of this size took {_size(usual)} of memory, {_size(verification)} of it for the comparison with "
            f"PyTorch; {_size(free)} are free. To leave the comparison out: "
        )
        warn(logger, (problem, Setting("verify", None)))


def min_memory(sizes: WeightSizes, options: BuildOptions) -> int:
    """Bytes that copies of weights take at the least; weights that stay mapped are no copies."""
    loaded = sizes.copied_bytes
    if options.precision == "float32":
        return loaded
    unchanged = sizes.can_stay.get(options.precision, 0) if sizes.keeps_half else 0
    return max(loaded, _HALF_BYTES * (sizes.total - unchanged))


def min_bundle_bytes(sizes: WeightSizes, options: BuildOptions) -> int:
    """Bytes that the weights of the bundle take on the disk at the least, without graphs and tokenizer."""
    half = sizes.half if sizes.keeps_half and sizes.can_stay else 0
    if options.precision != "float32":
        half = sizes.total
    # Smaller models keep up to a third of their products float.
    is_int8 = options.int8 is not None and sizes.total >= MIN_PARAMETERS
    return FLOAT32_BYTES * (sizes.total - half) + _HALF_BYTES * half + (sizes.of_layers if is_int8 else 0)


def free_disk_bytes(options: BuildOptions) -> int:
    """Free space of the disk on which the bundle is written."""
    place = options.output.resolve().parent
    return shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free


def _smaller(
    sizes: WeightSizes, options: BuildOptions, needed: Callable[[WeightSizes, BuildOptions], int], free: int
) -> Iterator[Message]:
    """Sentences about options without which the build fits."""
    can_stay = options.adapter is None and not options.trust.trust_remote_code
    changes: list[tuple[Setting, dict[str, Any]]] = []
    if options.fp32_weights and can_stay:
        changes.append((Setting("fp32_weights", True), {"fp32_weights": False}))
    if options.precision != "float32":
        changes.append((Setting("precision", options.precision, command="build"), {"precision": "float32"}))
    if options.int8 is not None:
        changes.append((Setting("int8", True), {"int8": None}))
    for setting, change in changes:
        other = dataclasses.replace(options, **change)
        keeps_half = sizes.keeps_half or (can_stay and not other.fp32_weights)
        least = needed(dataclasses.replace(sizes, keeps_half=keeps_half), other)
        if least <= free:
            yield ("Without ", setting, f" it needs {_size(least)}. ")


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"
