"""The steps of the suite, the most valuable first."""

from __future__ import annotations

__all__ = ["STEPS", "Step"]

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.job import Job


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: what it is called on the command line.
        budget_s: seconds after which it is ended; the rows that it has written stay.
        does: what it runs, in a process of its own, as ``module:function`` of this package: the module may need a
            package that is missing.
        options: of the function, besides the job.
    """

    name: str
    budget_s: float
    does: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, job: Job) -> None:
        """Do it, here."""
        function: Callable[..., None] = pkgutil.resolve_name(f"{__package__}.{self.does}")
        function(job, **self.options)


def _model(name: str, budget_s: float, model: str, variant: str) -> Step:
    return Step(name, budget_s, "end_to_end:measure", {"model": model, "variant": variant})


def _engine(name: str, budget_s: float, flavour: str, *, is_windowed: bool = False) -> Step:
    return Step(name, budget_s, "backends:run_engine", {"flavour": flavour, "is_windowed": is_windowed})


_WINDOW, _BLOCKS = {"family": "window"}, {"family": "blocks"}
_OTHER_HEADS = {"head_dims": (32, 80, 96, 128)}

STEPS = (
    Step("machine", 30, "machine:describe"),
    Step("answers-d64", 60, "kernels:check", _WINDOW | {"head_dims": (64,)}),
    Step("ceilings", 40, "machine:measure_ceilings"),
    Step("kernels-d64", 90, "kernels:time_kernels", _WINDOW | {"head_dims": (64,)}),
    Step("block-answers-d64", 60, "kernels:check", _BLOCKS | {"head_dims": (64,)}),
    Step("block-kernels-d64", 75, "kernels:time_kernels", _BLOCKS | {"head_dims": (64,)}),
    _model("bert-our-kernel", 60, "bert-base", "our kernel, window"),
    _model("bert-sdpa", 60, "bert-base", "torch sdpa"),
    _model("longformer-our-kernel", 60, "longformer-base", "our kernel"),
    _model("longformer-hugging-face", 60, "longformer-base", "hugging face"),
    Step("shipped-kernels", 45, "kernels:check_shipped", _WINDOW),
    Step("shipped-block-kernels", 45, "kernels:check_shipped", _BLOCKS),
    _engine("engine-tensorrt", 75, "tensorrt"),
    _engine("engine-tensorrt-plugin", 75, "tensorrt", is_windowed=True),
    _engine("engine-tensorrt-rtx", 60, "tensorrt_rtx"),
    _engine("engine-tensorrt-rtx-plugin", 60, "tensorrt_rtx", is_windowed=True),
    Step("onnxruntime", 45, "backends:run_onnxruntime"),
    _model("bert-flex", 75, "bert-base", "FlexAttention window"),
    _model("bert-compile", 75, "bert-base", "torch.compile"),
    _model("longformer-flex", 75, "longformer-base", "FlexAttention"),
    Step("registers", 60, "kernels:count_registers", _WINDOW),
    Step("block-registers", 60, "kernels:count_registers", _BLOCKS),
    Step("answers-other", 90, "kernels:check", _WINDOW | _OTHER_HEADS),
    Step("kernels-d128", 75, "kernels:time_kernels", _WINDOW | {"head_dims": (128,)}),
    Step(
        "block-kernels-d128",
        75,
        "kernels:time_kernels",
        _BLOCKS | {"head_dims": (128,), "dtype": "bfloat16"},
    ),
    Step("block-answers-other", 90, "kernels:check", _BLOCKS | _OTHER_HEADS),
    _model("longformer-compile", 75, "longformer-base", "torch.compile"),
    Step("gpu-tests", 90, "repository_tests:check"),
)
"""In order of value: time that runs out takes the last ones. Budgets are the most, and together more than the time."""
