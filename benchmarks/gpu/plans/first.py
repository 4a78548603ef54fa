"""Seven minutes: kernels as operators of ONNX Runtime, right first, then bundles and corpora beside their peers.

Estimates of steps that have run are from an H200, 2026-11-27: `machine` took 6 to 10 s, a whole model in ONNX Runtime
14 s, torch.compile 3 s a shape and FlexAttention 1 to 4 s. Estimates of the others are guesses from these.
"""

from __future__ import annotations

from benchmarks.gpu.plans.plan import Plan, step

PLAN = Plan(
    proves="that kernels are right and fast in ONNX Runtime, and that a corpus keeps the GPU busy",
    limit_s=7 * 60,
    steps=(
        step("machine", 10),
        step("operator-nodes", 60),
        step("bundle-bert-base", 40),
        step("bundle-longformer-base", 40),
        step("bundle-longformer-base-vectors", 40),
        step("corpus-inputs", 40),
        step("onnxruntime-dense", 40, 60),
        step("onnxruntime-kernels", 40, 60, peer="FlexAttention"),
        step("corpus-mixed", 110, 130, batch_sizes=(64, 128, 256)),
        step("corpus-passages", 30, 40),
        step("onnxruntime-answers", 25, 40),
        step("corpus-short", 60, 75, batch_sizes=(128, 512)),
    ),
    max_lines=60,
)
