"""The suite's steps: steps that time nothing run first and side by side, then timings, the most valuable first."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.cases import FAMILIES
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
        is_timed: has the GPU for itself; others run side by side.
        estimate_s: seconds that it takes; it does not start where less is left.
    """

    name: str
    budget_s: float
    proves: str
    does: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_timed: bool = True
    estimate_s: float = 5.0

    def run(self, job: Job) -> None:
        """Do it, here."""
        function: Callable[..., None] = pkgutil.resolve_name(f"{__package__}.{self.does}")
        function(job, **self.options)


_CHECK_SECONDS = 150
"""For each step that times nothing; on 16 cores all of them together."""


def _check(name: str, proves: str, does: str, **options: Any) -> Step:
    return Step(name, _CHECK_SECONDS, proves, does, options, is_timed=False)


def _model(name: str, budget_s: float, model: str, variant: str) -> Step:
    proves = f"how fast {model} is with {variant}, 512 to 16384 tokens"
    return Step(name, budget_s, proves, "end_to_end:measure", {"model": model, "variant": variant})


def _engine(name: str, budget_s: float, variant: str, *, is_windowed: bool = False) -> Step:
    proves = (
        f"that {variant} runs {'our plugin' if is_windowed else 'its own attention'}, right and how fast, or refuses"
    )
    return Step(name, budget_s, proves, "backends:run_engine", {"variant": variant, "is_windowed": is_windowed})


def _kernels(name: str, budget_s: float, proves: str, family: str, **options: Any) -> Step:
    return Step(name, budget_s, proves, "kernels:time_kernels", {"family": family, **options})


def _corpus(name: str, budget_s: float, corpus: str, **options: Any) -> Step:
    proves = f"how fast {corpus} texts are in ONNX Runtime beside sentence-transformers, and how busy the GPU is"
    return Step(name, budget_s, proves, "corpus:embed_corpus", {"corpus": corpus, **options})


BUNDLES = (
    "bert-base",
    "longformer-base",
    "longformer-base-vectors",
    "bert-base-windows-vectors",
    "bigbird-base-vectors",
)
"""Names of the bundles that steps of ONNX Runtime run: the model, windows in place of its attention, and whether it
answers with a vector per text."""

_CHECKED_HEADS = ((64,), (128,), (32, 80, 96))
"""Sizes of a head, of one step each."""

STEPS = (
    _check("machine", "which GPU, driver and packages the rows are of", "machine:describe"),
    _check("gpu-tests", "that every test marked gpu passes", "repository_tests:check"),
    _check("shipped-kernels", "that every operator is right as machine code of a bundle", "kernels:check_shipped"),
    _check("operator-nodes", "that every operator is right by its kernels in ONNX Runtime", "operator_nodes:check"),
    _check("long-answers", "that every operator is right at 4096 and 16384 tokens", "kernels:check_long"),
    _check("memory-checks", "that shipped kernels read and write what is theirs", "sanitizer:check", tool="memcheck"),
    _check("race-checks", "that no threads of shipped kernels race", "sanitizer:check", tool="racecheck"),
    *(
        _check(
            f"answers-{family}-d{'-'.join(map(str, heads))}", f"that {family} are right at these sizes of a head",
            "kernels:check", family=family, head_dims=heads,
        )
        for family in FAMILIES
        for heads in _CHECKED_HEADS
    ),
    *(
        _check(f"bundle-{name}", f"that {name} of base shape is built", "backends:build_model", bundle=name)
        for name in BUNDLES
    ),
    _check("corpus-inputs", "that the model that embeds corpora is built", "corpus:build_model", model="bert-base"),
    _check("job-inputs", "that the job's model and texts are made", "corpus:make_job"),
    Step("ceilings", 20, "what the GPU can do at most", "machine:measure_ceilings"),
    _corpus("corpus-mixed", 90, "mixed", rounds=2),
    Step("corpus-job", 110, "how fast 100,000 texts are by hdexport run and by ten lines of sentence-transformers",
         "corpus:run_job"),
    _corpus("corpus-short", 60, "short"),
    _corpus("corpus-long", 50, "long"),
    _corpus("corpus-passages", 40, "passages", has_baselines=False),
    _kernels("kernels-d64", 90, "how fast windows are beside dense ones", "window", head_dims=(64,)),
    _kernels("kernels-d128", 70, "how fast windows are at 128", "window", head_dims=(128,)),
    _kernels("block-kernels-d64", 45, "how fast blocks are", "blocks", head_dims=(64,)),
    _kernels("kernels-window-64", 35, "how fast windows of 64 tokens are", "window", head_dims=(64,), window=64),
    _kernels("kernels-window-512", 35, "how fast windows of 512 tokens are", "window", head_dims=(64,), window=512),
    Step("onnxruntime", 30, "that ONNX Runtime's graph for CUDA is right, and how fast", "backends:run_onnxruntime"),
    _model("bert-our-kernel", 30, "bert-base", "our kernel, window"),
    _model("bert-sdpa", 35, "bert-base", "torch sdpa"),
    _model("longformer-our-kernel", 30, "longformer-base", "our kernel"),
    _model("longformer-hugging-face", 40, "longformer-base", "hugging face"),
    Step("bert-onnxruntime", 22, "how fast bert-base is in ONNX Runtime on CUDA, right first", "backends:run_model",
         {"model": "bert-base"}),
    Step("longformer-onnxruntime", 22, "how fast longformer-base is there", "backends:run_model",
         {"model": "longformer-base"}),
    Step("onnxruntime-kernels", 30, "that Longformer's bundle answers alike there by kernels and bodies, and how fast",
         "backends:compare_kernels", {"model": "longformer-base"}),
    Step("onnxruntime-dense", 30, "the same of bert-base with dense attention, and how fast beside torch.compile",
         "backends:compare_kernels", {"model": "bert-base", "peer": "torch.compile"}),
    Step("onnxruntime-answers", 25, "how fast Longformer's answers get to where they are wanted, right first",
         "backends:time_answers", {"model": "longformer-base"}),
    Step("onnxruntime-windows", 18, "the same of bert-base with windows, and that memory grows as tokens do",
         "backends:time_answers", {"model": "bert-base", "is_windowed": True}),
    Step("onnxruntime-blocks", 16, "the same of BigBird", "backends:time_answers", {"model": "bigbird-base"}),
    _model("bert-flex", 45, "bert-base", "FlexAttention window"),
    _model("longformer-flex", 45, "longformer-base", "FlexAttention"),
    _model("bert-compile", 42, "bert-base", "torch.compile"),
    _model("longformer-compile", 30, "longformer-base", "torch.compile"),
    _corpus("corpus-compiled", 75, "mixed", compiles=True, batch_sizes=(256,)),
    _kernels("window-tiles", 45, "which of the windows' tiles are faster at 64 and 128", "window",
             head_dims=(64, 128), is_tuned=True),
    _kernels("chunk-kernels", 45, "how fast chunks are", "chunks", head_dims=(64,)),
    _kernels("lsh-kernels", 20, "how fast LSH is", "lsh", head_dims=(64,)),
    _kernels("distance-kernels", 60, "how fast distances are", "distances", head_dims=(64,)),
    _kernels("relative-kernels", 20, "how fast relative attention is", "relative", head_dims=(64,)),
    _engine("engine-tensorrt", 55, "tensorrt"),
    _engine("engine-tensorrt-plugin", 55, "tensorrt", is_windowed=True),
    _engine("engine-tensorrt-rtx", 50, "tensorrt_rtx"),
    _engine("engine-tensorrt-rtx-plugin", 50, "tensorrt_rtx", is_windowed=True),
    _kernels("block-kernels-d128", 40, "how fast blocks are at 128, in bfloat16", "blocks", head_dims=(128,),
             dtype="bfloat16"),
)  # fmt: skip
"""In the order of what is learnt a minute. Budgets are the most, and all together fit the plan ``all``."""
