"""The plans: one file each, whose name is the plan's and which has a ``PLAN``."""

from __future__ import annotations

import pkgutil

from benchmarks.gpu.plans.plan import Plan

PLANS: dict[str, Plan] = {
    found.name: pkgutil.resolve_name(f"{__name__}.{found.name}:PLAN")
    for found in pkgutil.iter_modules(__path__)
    if found.name != "plan"
}
