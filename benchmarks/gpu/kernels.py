"""The steps about the attention kernels: their answers, their speed, and what the compiler made of them.

A call is captured in a CUDA graph and replayed, so that launching from Python is not what is measured; each replay
starts with a cold L2 cache. Rates count the required work only: 4 * head_dim floating-point operations for
each query and key that it sees. The roofline takes the rate of a large matrix product and the bandwidth of a large
copy, both measured in the same run. The batch is such that every case has the same number of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import DTYPES, FAMILIES, HIDDEN_SIZE, Case
from benchmarks.gpu.job import Job, StepFailedError
from benchmarks.gpu.peers import PEERS
from benchmarks.roofline.ceilings import Ceilings, measured_ceilings, times_ms
from hdplugins import Operator
from hdplugins.attention.kernel_launch import launch
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import HEAD_DIMS, BlockConfig, cubin_architecture
from hdplugins.kernels.cuda_launch import LoadedKernel, PreparedLaunch, find_kernels, load_kernels

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
LENGTHS = (4096, 512, 16384, 1024, 2048, 8192)
"""In order of what a cut should lose last."""

TOTAL_TOKENS = 65536
WINDOW = 256

_LONG = (
    {"batch": 2, "heads": 12, "tokens": 4096},
    {"batch": 2, "heads": 1, "tokens": 16384},
)
"""Shapes of a base model's layer, whose definition in float64 fits a GPU's memory."""

_REHEARSED_LONG = ({"batch": 2, "heads": 2, "tokens": 300},)

_EXP2_ERROR = 2.0**-22
"""Most relative error of the instruction (PTX ISA, ``ex2.approx.ftz.f32``)."""

_AGREES = 2.0**-6
"""Most difference between a peer's answers and our answers. Neither are exact: in bfloat16 weights and results of up to
4 keep 8 bits. A window that is wrong by a token differs by far more."""

_REHEARSED_WINDOW = 8
_REHEARSED_BLOCK_CONFIGS = 2
"""Of those that are tuned."""

_NO_CEILINGS = Ceilings(device="cpu", dtype="float16", matmul_flops_per_s=1.0, copy_bytes_per_s=1.0)
"""Of a rehearsal, which claims nothing about time."""

_INTERPRETED_ARCHITECTURE = 80
"""Whose tiles Triton's interpreter uses."""

_MOST_INTERPRETED_TOKENS = 333
_REPEAT_SECONDS = 0.2
_TUNING_SECONDS = 0.05


def why_no_gpu() -> str | None:
    """Why nothing can be run on a GPU here; None where it can."""
    try:
        import torch
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        return f"the package {error.name!r} is not installed, without which none can be used"
    return None if torch.cuda.is_available() else "PyTorch finds none"


@functools.cache
def architecture_of(device: str) -> int:
    """Compute capability as in sm_90: 90; of the CPU, the one whose tiles a rehearsal uses."""
    import torch

    if device == "cpu":
        return _INTERPRETED_ARCHITECTURE
    major, minor = torch.cuda.get_device_capability()
    return 10 * int(major) + int(minor)


def check(job: Job, family: str, head_dims: Sequence[int] = HEAD_DIMS) -> None:
    """The kernels' answers, against the operator's definition in float64; fails if any is wrong.

    Args:
        head_dims: the sizes of a head to check; a rehearsal has one of its own.
    """
    cases = FAMILIES[family]
    block_config = cases.REHEARSED_BLOCK_CONFIG if job.rehearsal else None
    for head_dim in (32,) if job.rehearsal else head_dims:
        asked = itertools.chain.from_iterable(cases.checked(head_dim, dtype) for dtype in DTYPES)
        problems = [found for case in asked if (found := _problem(case, job.device, block_config))]
        job.write(case="answers", head_dim=head_dim, problems=problems)
        if problems:
            raise StepFailedError(f"{len(problems)} wrong answers, the first: {problems[0]}")


def check_long(job: Job) -> None:
    """Every operator's answers at 4096 and 16384 tokens, in every dtype; fails if any is wrong."""
    problems = []
    for family, cases in FAMILIES.items():
        block_config = cases.REHEARSED_BLOCK_CONFIG if job.rehearsal else None
        for head_dim, dtype in itertools.product((32,) if job.rehearsal else (64, 128), DTYPES):
            checked = list(cases.checked(head_dim, dtype))
            most = max(case.tokens for case in checked)
            for case, shape in itertools.product(checked, _REHEARSED_LONG if job.rehearsal else _LONG):
                if case.tokens != most:
                    continue
                long = dataclasses.replace(case, **shape)
                found = _problem(long, job.device, block_config)
                problems += [found] if found else []
                job.write(case="long answers", family=family, **long.row, problem=found)
    if problems:
        raise StepFailedError(f"{len(problems)} wrong answers, the first: {problems[0]}")


def time_kernels(
    job: Job,
    family: str,
    head_dims: Sequence[int],
    dtype: str = "float16",
    *,
    lengths: Sequence[int] = LENGTHS,
    window: int = WINDOW,
    total_tokens: int = TOTAL_TOKENS,
    is_tuned: bool = False,
) -> None:
    """The kernels beside their peers, at every length; fails at the end if a peer's answers were not ours.

    Args:
        job: of the step; a rehearsal has a shape of its own.
        window: tokens on each side of a query.
        total_tokens: batch x tokens.
        is_tuned: the kernels alone, at the longest length, with other tiles than the table's too.
    """
    cases = FAMILIES[family]
    ceilings = _NO_CEILINGS if job.rehearsal else measured_ceilings("cuda", dtype)
    if job.rehearsal:
        head_dims, lengths, window, total_tokens = (128,), (cases.REHEARSED_TOKENS,), _REHEARSED_WINDOW, 0
    disagreements = []
    for head_dim, tokens in itertools.product(head_dims, [max(lengths)] if is_tuned else lengths):
        batch, heads = max(1, total_tokens // tokens), HIDDEN_SIZE // head_dim
        shape = {"batch": batch, "heads": heads, "tokens": tokens, "head_dim": head_dim, "dtype": ceilings.dtype}
        timed = list(cases.timed(window, **shape))
        if is_tuned:
            # The one with globals, or with a table, or of several rounds, or with values.
            _time_tiles(job, [case for _, case, computed_by in timed if computed_by == "kernel"][1], ceilings)
            continue
        ours: dict[str, Any] = {}
        for name, case, computed_by in timed:
            missing = None if computed_by == "kernel" else PEERS[computed_by].missing()
            if missing:
                print(f"{name}: left out, for {missing}", file=sys.stderr)
                continue
            try:
                call = _call(case, job.device, computed_by)
                agreement = _agreement(ours, case, computed_by, call())
                job.write(**timed_row(name, case, call, ceilings, least_s=job.least_s(_REPEAT_SECONDS)), **agreement)
            except Exception as error:  # a peer that refuses or fails is a result
                if computed_by == "kernel":
                    raise
                job.write(case="refused", name=name, **case.row, reason=f"{type(error).__name__}: {error}"[:500])
                if isinstance(error, StepFailedError):
                    disagreements.append(f"{name}, {case.row}: {error}")
    if disagreements:
        raise StepFailedError("; ".join(disagreements))


def count_registers(job: Job, family: str, architectures: Sequence[int]) -> None:
    """Registers and spills of `attend`, compiled ahead of time as a build does; no GPU is needed.

    Args:
        job: of the step; a rehearsal compiles one kernel.
        architectures: to compile for.
    """
    from hdplugins.kernels.aot import compile_kernels

    cases = FAMILIES[family]
    asked = itertools.product(cases.COMPILED, DTYPES, HEAD_DIMS)
    if job.rehearsal:
        asked = itertools.product([cases.COMPILED[len(cases.COMPILED) // 2]], ("float16",), (32,))
    for attributes, dtype, head_dim in asked:
        spec, shapes = plugin_spec_of(cases.OPERATOR), cases.compiled_shapes(head_dim)
        sources = spec.kernel_sources(shapes, attributes, dtype=dtype, architectures=architectures)
        start = time.perf_counter()
        kernels = compile_kernels(sources)
        seconds = time.perf_counter() - start
        for kernel in kernels:
            if kernel.function == "attend":
                job.write(
                    case="compile", dtype=dtype, head_dim=head_dim, architecture=kernel.architecture,
                    registers=kernel.registers, spilled_bytes=kernel.spilled_bytes, shared_bytes=kernel.shared_bytes,
                    seconds_of_all_architectures=seconds, block_size=kernel.constants.get("block_size"),
                )  # fmt: skip


def check_shipped(job: Job) -> None:
    """Kernels as a bundle has them: compiled ahead of time, loaded and launched through the driver, and right.

    It is the plugin's way but for TensorRT around it. A rehearsal does all but load and start them.
    """
    problems = [f"{family}: {found}" for family in FAMILIES if (found := _shipped_problem(job, family))]
    if problems:
        raise StepFailedError("; ".join(problems))


def _shipped_problem(job: Job, family: str) -> str | None:
    import torch

    case = FAMILIES[family].shipped()
    spec, operator = plugin_spec_of(case.OPERATOR), case.OPERATOR
    architecture = architecture_of(job.device)
    tensors = [tensor for tensor in case.tensors(job.device, is_ragged=True) if tensor is not None]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    with tempfile.TemporaryDirectory() as folder:
        write_shipped(Path(folder), case, tensors, architecture=architecture)
        kernels = _loaded(job, Path(folder), case, architecture, shapes)
    out, scratch = _buffers(operator, tensors, case.attributes)
    places = dict(zip(operator.inputs, tensors, strict=False)) | {spec.OUTPUT: out} | scratch
    constants = {name: kernel.compiled.constants for name, kernel in kernels.items()}
    launches = [
        PreparedLaunch(kernels[launch.kernel], launch, {name: place for place, name in enumerate(places)})
        for launch in spec.launches(shapes, case.attributes, constants=constants)
    ]
    problem = None
    if not job.rehearsal:
        for launch in launches:
            launch.start([tensor.data_ptr() for tensor in places.values()], kernels["attend"].driver.CUstream(0))
        torch.cuda.synchronize()
        problem = difference(case, tensors, out)
    job.write(case="shipped kernels", family=family, architecture=architecture, problem=problem)
    return problem


def write_shipped(folder: Path, case: Case, tensors: Sequence[Any], *, architecture: int) -> None:
    """Compile the kernels of a case, whose inputs are those tensors, into a folder like a bundle's."""
    from hdplugins.kernels.aot import compile_kernels

    sources = plugin_spec_of(case.OPERATOR).kernel_sources(
        [tuple(tensor.shape) for tensor in tensors],
        case.attributes,
        dtype=case.dtype,
        architectures=[cubin_architecture(architecture)],
    )
    for kernel in compile_kernels(sources):
        for file in (kernel.cubin, kernel.metadata):
            shutil.copyfile(file, folder / f"{case.OPERATOR.name}-{file.name}")


def attention_call(
    operator: Operator,
    tensors: Sequence[Any],
    attributes: Mapping[str, Any],
    *,
    block_config: BlockConfig | None = None,
) -> Callable[[], Any]:
    """A call of an operator's kernels that allocates nothing; output and workspace hold NaN before the first call.

    Args:
        tensors: its inputs, as `launch` takes them, on a GPU, or on the CPU where Triton interprets.
        tiles: instead of the table's.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
    dtype, architecture = str(tensors[0].dtype).removeprefix("torch."), architecture_of(tensors[0].device.type)
    of_gpu = block_config or plugin_spec_of(operator).block_config(
        shapes, attributes, dtype=dtype, architecture=architecture
    )
    out, scratch = _buffers(operator, tensors, attributes)

    def call() -> Any:
        launch(operator, tensors, out, scratch, block_config=of_gpu, attributes=attributes)
        return out

    return call


def compare(actual: Any, right: Any, pytorch: Any) -> str | None:
    """What is wrong with `actual`, or None.

    The error of `actual` may be twice PyTorch's error in the same dtype, and a rounding, and twice the error of the
    GPU's exp2: once in the weights, once in the sum of the weights.
    """
    import torch

    if not torch.isfinite(actual).all():
        return f"{int((~torch.isfinite(actual)).sum())} values are not finite"
    if (actual[(right == 0).all(-1)] != 0).any():
        return "a row that sees no key is not 0"
    allowed = 2 * float((pytorch.double() - right).abs().max())
    allowed += (torch.finfo(actual.dtype).eps + 2 * _EXP2_ERROR) * float(right.abs().max())
    error = float((actual.double() - right).abs().max())
    return None if error <= allowed else f"error {error:.3g} > {allowed:.3g}"


def timed_row(
    name: str, case: Case, call: Callable[[], Any], ceilings: Ceilings, *, least_s: float = _REPEAT_SECONDS
) -> dict[str, Any]:
    """How long a call takes, beside the roofline; its runs together take `least_s`."""
    flops = 4 * case.head_dim * case.batch * case.pairs()
    element_bytes = 4 if case.dtype == "float32" else 2
    moved_bytes = 4 * case.batch * case.heads * case.tokens * case.head_dim * element_bytes
    times = times_ms(call, device=ceilings.device, least_s=least_s)
    p20_ms, _, _, p80_ms = statistics.quantiles(times, n=5)
    median_ms = statistics.median(times)
    return {
        "case": name,
        **case.row,
        "median_ms": median_ms,
        "p20_ms": p20_ms,
        "p80_ms": p80_ms,
        "tflops": flops / median_ms / 1e9,
        "roofline_ms": max(flops / ceilings.matmul_flops_per_s, moved_bytes / ceilings.copy_bytes_per_s) * 1e3,
    }


def _problem(case: Case, device: str, block_config: BlockConfig | None) -> str | None:
    """What is wrong with the kernels' answer, as a sentence; None also where it is not requested.

    Triton's interpreter multiplies the bit patterns of bfloat16 as integers, and takes long for a long text.
    """
    if device == "cpu" and (case.dtype == "bfloat16" or case.tokens > _MOST_INTERPRETED_TOKENS):
        return None
    tensors = case.tensors(device, is_ragged=True)
    found = difference(
        case, tensors, attention_call(case.OPERATOR, tensors, case.attributes, block_config=block_config)()
    )
    shape = [case.batch, case.tokens, case.heads, case.head_dim]
    return f"{case.dtype} {shape}, {case.attributes}: {found}" if found else None


def difference(case: Case, tensors: Sequence[Any], actual: Any) -> str | None:
    """What is wrong with an answer to a case with those inputs, or None; see `compare`."""
    reference = functools.partial(case.OPERATOR.definition, **case.attributes)
    is_own = [dtype is None for dtype in plugin_spec_of(case.OPERATOR).INPUT_DTYPES]
    exact = [
        tensor.double() if own and tensor is not None else tensor for tensor, own in zip(tensors, is_own, strict=False)
    ]
    return compare(actual, reference(*exact), reference(*tensors))


def _time_tiles(job: Job, case: Case, ceilings: Ceilings) -> None:
    """Time the table's tiles, then others; tiles that do not fit are reported."""
    from triton.runtime.errors import OutOfResources

    shapes = [tuple(tensor.shape) for tensor in case.tensors(job.device) if tensor is not None]
    table = plugin_spec_of(case.OPERATOR).block_config(
        shapes, case.attributes, dtype=case.dtype, architecture=architecture_of(job.device)
    )
    block_ds = {table.block_d, 1 << (case.head_dim.bit_length() - 1)}
    others = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), block_ds, (1, 3))
    candidates = dict.fromkeys([table, *itertools.starmap(BlockConfig, others)])
    for block_config in itertools.islice(candidates, _REHEARSED_BLOCK_CONFIGS if job.rehearsal else None):
        try:
            call = attention_call(case.OPERATOR, case.tensors(job.device), case.attributes, block_config=block_config)
            row = timed_row("block_config", case, call, ceilings, least_s=job.least_s(_TUNING_SECONDS))
            job.write(**row, block_config=asdict(block_config))
        except OutOfResources as error:
            print(f"{block_config} does not fit: {error}", file=sys.stderr)


def _call(case: Case, device: str, computed_by: str) -> Callable[[], Any]:
    import torch

    torch.manual_seed(0)  # equal shapes get equal inputs
    tensors = case.tensors(device)
    if computed_by == "kernel":
        return attention_call(case.OPERATOR, tensors, case.attributes)
    return PEERS[computed_by].prepare(case, tensors)


def _agreement(ours: dict[str, Any], case: Case, computed_by: str, answer: Any) -> dict[str, Any]:
    """The difference of a peer's answer from our answer of the same case, which is timed before the peer is.

    Raises:
        StepFailedError: the difference is no rounding: the peer computes something else, or our kernel is wrong.
    """
    if computed_by == "kernel":
        ours[str(case)] = answer.clone()
        return {}
    if not case.is_computed_by(computed_by):
        return {}
    difference = float((answer.float() - ours[str(case)].float()).abs().max())
    if not difference <= _AGREES:
        raise StepFailedError(f"its answers differ from ours by {difference:.3g}")
    return {"difference": difference}


def _buffers(operator: Operator, tensors: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The output, and the scratch buffers by name; they hold NaN."""
    import torch

    shapes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
    scratch = {
        name: torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        for name, size in plugin_spec_of(operator).workspace(shapes, attributes).items()
    }
    out = torch.empty_like(tensors[0])
    out.fill_(torch.nan)
    for buffer in scratch.values():
        buffer.fill_(0xFF)
    return out, scratch


def _loaded(
    job: Job, folder: Path, case: Case, architecture: int, shapes: Sequence[tuple[int, ...]]
) -> dict[str, LoadedKernel]:
    import torch

    spec, prefix = plugin_spec_of(case.OPERATOR), f"{case.OPERATOR.name}-"

    def serves(kernel: Any) -> bool:
        return spec.serves(kernel, shapes, case.attributes, dtype=case.dtype)

    if job.rehearsal:
        found = find_kernels(folder, prefix, spec.kernels, architecture=architecture, serves=serves)
        return {name: LoadedKernel(compiled=kernel, function=None, driver=None) for name, kernel in found.items()}
    torch.cuda.init()
    return load_kernels(folder, prefix, spec.kernels, serves=serves)
