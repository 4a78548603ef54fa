"""The steps of the suite, the most valuable first."""

from __future__ import annotations

__all__ = ["STEPS", "Step"]

from collections.abc import Callable
from dataclasses import dataclass

from gpu_suite.job import Job


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: what it is called on the command line.
        budget_s: seconds after which it is ended; the rows that it has written stay.
        run: does it, in a process of its own; imports what it needs there.
        rehearsed_by: steps whose rehearsal runs the same code, so that this one needs none; () for none.
    """

    name: str
    budget_s: float
    run: Callable[[Job], None]
    rehearsed_by: tuple[str, ...] = ()


def _machine(job: Job) -> None:
    from gpu_suite.machine import describe

    describe(job)


def _ceilings(job: Job) -> None:
    from gpu_suite.machine import measure_ceilings

    measure_ceilings(job)


def _answers(*head_dims: int) -> Callable[[Job], None]:
    def run(job: Job) -> None:
        from gpu_suite.kernels import check

        check(job, head_dims)

    return run


def _kernels(*head_dims: int) -> Callable[[Job], None]:
    def run(job: Job) -> None:
        from gpu_suite.kernels import time_kernels

        time_kernels(job, head_dims)

    return run


def _block_answers(*head_dims: int) -> Callable[[Job], None]:
    def run(job: Job) -> None:
        from gpu_suite.block_kernels import check

        check(job, head_dims)

    return run


def _block_kernels(head_dim: int, dtype: str) -> Callable[[Job], None]:
    def run(job: Job) -> None:
        from gpu_suite.block_kernels import time_kernels

        time_kernels(job, head_dim, dtype)

    return run


def _block_registers(job: Job) -> None:
    from gpu_suite.block_kernels import count_registers

    count_registers(job)


def _shipped_blocks(job: Job) -> None:
    from gpu_suite.block_kernels import check_shipped

    check_shipped(job)


def _registers(job: Job) -> None:
    from gpu_suite.kernels import count_registers

    count_registers(job)


def _shipped(job: Job) -> None:
    from gpu_suite.kernels import check_shipped

    check_shipped(job)


def _gpu_tests(job: Job) -> None:
    from gpu_suite.kernels import check_gpu_tests

    check_gpu_tests(job)


def _model(model: str, variant: str) -> Callable[[Job], None]:
    def run(job: Job) -> None:
        from gpu_suite.end_to_end import measure

        measure(job, model, variant)

    return run


def _engine(flavour: str, *, is_windowed: bool) -> Callable[[Job], None]:
    def run(job: Job) -> None:
        from gpu_suite.backends import run_engine
        from hdruntime.bundle.manifest import Backend

        run_engine(job, Backend(flavour), is_windowed=is_windowed)

    return run


def _onnxruntime(job: Job) -> None:
    from gpu_suite.backends import run_onnxruntime

    run_onnxruntime(job)


STEPS = (
    Step("machine", 30, _machine),
    Step("answers-d64", 60, _answers(64)),
    Step("ceilings", 40, _ceilings),
    Step("kernels-d64", 90, _kernels(64)),
    Step("block-answers-d64", 60, _block_answers(64)),
    Step("block-kernels-d64", 75, _block_kernels(64, "float16")),
    Step("bert-our-kernel", 60, _model("bert-base", "our kernel, window")),
    Step("bert-sdpa", 60, _model("bert-base", "torch sdpa")),
    Step("longformer-our-kernel", 60, _model("longformer-base", "our kernel")),
    Step("longformer-hugging-face", 60, _model("longformer-base", "hugging face")),
    Step("shipped-kernels", 45, _shipped),
    Step("shipped-block-kernels", 45, _shipped_blocks),
    Step("engine-tensorrt", 75, _engine("tensorrt", is_windowed=False)),
    Step("engine-tensorrt-plugin", 75, _engine("tensorrt", is_windowed=True)),
    Step("engine-tensorrt-rtx", 60, _engine("tensorrt_rtx", is_windowed=False), ("engine-tensorrt-rtx-plugin",)),
    Step("engine-tensorrt-rtx-plugin", 60, _engine("tensorrt_rtx", is_windowed=True)),
    Step("onnxruntime", 45, _onnxruntime),
    Step("bert-flex", 75, _model("bert-base", "FlexAttention window")),
    Step("bert-compile", 75, _model("bert-base", "torch.compile")),
    Step("longformer-flex", 75, _model("longformer-base", "FlexAttention")),
    Step("registers", 60, _registers),
    Step("block-registers", 60, _block_registers),
    Step("answers-other", 90, _answers(32, 80, 96, 128), ("answers-d64",)),
    Step("kernels-d128", 75, _kernels(128), ("kernels-d64",)),
    Step("block-kernels-d128", 75, _block_kernels(128, "bfloat16"), ("block-kernels-d64",)),
    Step("block-answers-other", 90, _block_answers(32, 80, 96, 128), ("block-answers-d64",)),
    Step(
        "longformer-compile",
        75,
        _model("longformer-base", "torch.compile"),
        ("longformer-hugging-face", "bert-compile"),
    ),
    Step("gpu-tests", 90, _gpu_tests),
)
"""In order of value: time that runs out takes the last ones. Budgets are the most, and together more than the time."""
