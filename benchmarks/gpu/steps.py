"""The steps of the suite, the most valuable first."""

from __future__ import annotations

__all__ = ["PLAN_MINUTES", "STEPS", "Step"]

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
        proves: what is known when it ended well.
        does: what it runs, in a process of its own, as ``module:function`` of this package: the module may need a
            package that is missing.
        options: of the function, besides the job.
    """

    name: str
    budget_s: float
    proves: str
    does: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, job: Job) -> None:
        """Do it, here."""
        function: Callable[..., None] = pkgutil.resolve_name(f"{__package__}.{self.does}")
        function(job, **self.options)


def _model(name: str, budget_s: float, model: str, variant: str) -> Step:
    proves = f"how fast {model} is with {variant}, 512 to 16384 tokens"
    return Step(name, budget_s, proves, "end_to_end:measure", {"model": model, "variant": variant})


def _engine(name: str, budget_s: float, flavour: str, *, is_windowed: bool = False) -> Step:
    proves = (
        f"that {flavour} runs {'our plugin' if is_windowed else 'its own attention'}, right and how fast, or refuses"
    )
    return Step(name, budget_s, proves, "backends:run_engine", {"flavour": flavour, "is_windowed": is_windowed})


def _kernels(name: str, budget_s: float, proves: str, function: str, family: str, **options: Any) -> Step:
    return Step(name, budget_s, proves, f"kernels:{function}", {"family": family, **options})


_OTHER_HEADS = (32, 80, 96, 128)

STEPS = (
    Step("machine", 20, "which GPU, driver and packages the rows are of", "machine:describe"),
    Step("gpu-tests", 180, "that every test marked gpu passes", "repository_tests:check"),
    _kernels("answers-d64", 45, "that windows are right at head_dim 64", "check", "window", head_dims=(64,)),
    _kernels("block-answers-d64", 45, "that blocks are right at head_dim 64", "check", "blocks", head_dims=(64,)),
    _kernels("shipped-kernels", 45, "that windows are right as machine code of a bundle", "check_shipped", "window"),
    _kernels("shipped-block-kernels", 45, "that blocks are right as machine code", "check_shipped", "blocks"),
    Step("ceilings", 40, "what the GPU can do at most", "machine:measure_ceilings"),
    _kernels("kernels-d64", 105, "how fast windows are beside dense ones", "time_kernels", "window", head_dims=(64,)),
    _kernels("window-tiles", 30, "which of the windows' tiles are faster at 64 and 128", "time_kernels", "window",
             head_dims=(64, 128), is_tuned=True, of_face=True),
    _kernels("block-kernels-d64", 60, "how fast blocks are", "time_kernels", "blocks", head_dims=(64,)),
    _engine("engine-tensorrt", 75, "tensorrt"),
    _engine("engine-tensorrt-plugin", 75, "tensorrt", is_windowed=True),
    _engine("engine-tensorrt-rtx", 60, "tensorrt_rtx"),
    _engine("engine-tensorrt-rtx-plugin", 60, "tensorrt_rtx", is_windowed=True),
    Step("onnxruntime", 45, "that ONNX Runtime's graph for CUDA is right, and how fast", "backends:run_onnxruntime"),
    _model("bert-our-kernel", 50, "bert-base", "our kernel, window"),
    _model("bert-sdpa", 50, "bert-base", "torch sdpa"),
    _model("longformer-our-kernel", 50, "longformer-base", "our kernel"),
    _model("longformer-hugging-face", 50, "longformer-base", "hugging face"),
    _model("bert-flex", 60, "bert-base", "FlexAttention window"),
    _model("longformer-flex", 60, "longformer-base", "FlexAttention"),
    _kernels("answers-other", 70, "that windows are right at other sizes", "check", "window", head_dims=_OTHER_HEADS),
    _kernels("block-answers-other", 70, "that blocks are too", "check", "blocks", head_dims=_OTHER_HEADS),
    _model("bert-compile", 60, "bert-base", "torch.compile"),
    _kernels("kernels-d128", 60, "how fast windows are at 128", "time_kernels", "window", head_dims=(128,)),
    _kernels("block-kernels-d128", 60, "how fast blocks are at 128, in bfloat16", "time_kernels", "blocks",
             head_dims=(128,), dtype="bfloat16"),
    _model("longformer-compile", 60, "longformer-base", "torch.compile"),
    _kernels("registers", 25, "how many registers this GPU's compiler gives windows", "count_registers", "window"),
    _kernels("block-registers", 25, "how many it gives blocks", "count_registers", "blocks"),
)  # fmt: skip
"""In the order of what is learnt a minute: right answers first, then engines and kernels, then peers.

Budgets are the most; all together are the plan for half an hour on a GPU (`PLAN_MINUTES`), so that no step is left out.
"""

PLAN_MINUTES = 28.0
"""For all steps; the rest of half an hour is for the machine's start and the transfers."""
