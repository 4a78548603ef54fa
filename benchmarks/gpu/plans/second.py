"""Five minutes: the window kernels and the candidate in Gluon beside FlashAttention 4, then what failed in the first.

Estimates: on an H100, 2026-11-26, `kernels-d64` took 32 s for the first length, which compiles, and 7 s for each other;
`kernels-d128` 32 and 3 s; `bert-our-kernel` 10 s for all its shapes and 7 s to begin. The candidate is a guess.
"""

from __future__ import annotations

from benchmarks.gpu.plans.plan import REQUIRES, Plan, step

_LENGTHS = (4096, 512, 16384)

PLAN = Plan(
    proves="whether the candidate in Gluon is as fast as FlashAttention 4, and what was repeated",
    limit_s=5 * 60,
    steps=(
        step("machine", 10),
        step("kernels-d64", 65, 90, lengths=_LENGTHS),
        step("kernels-d128", 55, 80, lengths=_LENGTHS),
        step("bert-our-kernel", 20, shapes=((1, 4096), (8, 4096))),
    ),
    requires=(*REQUIRES, "flash-attn-4>=4.0.0b36"),
    max_lines=60,
    repeats="first",
)
