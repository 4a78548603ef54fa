"""A toy: every query sees the tokens that are a multiple of k away from it, by standard operators."""

from every_kth.kind import EveryKthKind

__all__ = ["EveryKthKind"]
