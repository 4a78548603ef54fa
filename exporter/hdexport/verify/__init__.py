"""Verification: a bundle's answers, compared with PyTorch's over a grid of lengths, batches and paddings."""

from __future__ import annotations

__all__ = ["Check", "Grid", "Verification", "verify_bundle", "with_code", "with_texts"]

from hdexport.support.check import Check
from hdexport.verify.checks import Verification
from hdexport.verify.from_text import with_texts
from hdexport.verify.grid import Grid
from hdexport.verify.own_code import with_code
from hdexport.verify.verification import verify_bundle
