"""All steps, where there is half an hour."""

from __future__ import annotations

from benchmarks.gpu.plans.plan import Plan
from benchmarks.gpu.steps import STEPS

PLAN = Plan(proves="everything worth knowing", limit_s=30 * 60, steps=STEPS)
