"""Baselines of other products, beside those of `hdexport bench`; one file per product."""

from __future__ import annotations

__all__ = ["BASELINES"]

from benchmarks.baselines.openvino import OpenVino, OpenVinoDefault, OpenVinoInt8
from benchmarks.baselines.optimum import Optimum
from benchmarks.baselines.sentence_transformers import SentenceTransformers
from hdexport.bench.baselines import BASELINES as OWN
from hdexport.bench.baselines.baseline import Baseline

_OTHERS: tuple[Baseline, ...] = (
    OpenVino(),
    OpenVinoDefault(),
    OpenVinoInt8(),
    Optimum(),
    SentenceTransformers(),
)

BASELINES: dict[str, Baseline] = {**OWN, **{baseline.name: baseline for baseline in _OTHERS}}
"""Name -> baseline, in the order of tables."""
