"""A whole corpus: how fast a bundle and sentence-transformers embed texts of mixed lengths, each as users call it."""

from __future__ import annotations

__all__ = ["SAMPLES", "CorpusBench", "CorpusOptions", "CorpusResult", "CorpusSeries"]

from hdexport.bench.corpus.bench import CorpusBench, CorpusOptions
from hdexport.bench.corpus.result import CorpusResult, CorpusSeries
from hdexport.bench.corpus.samples import SAMPLES
