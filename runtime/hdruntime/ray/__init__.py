"""Bundles on a Ray cluster: a pool for batch jobs, and a class for `map_batches` of Ray Data. See docs/ray.md."""

from __future__ import annotations

__all__ = ["BundleMapper", "RayPool"]

from hdruntime.ray.mapper import BundleMapper
from hdruntime.ray.pool import RayPool
