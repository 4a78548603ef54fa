"""How far rows may be padded before their answers change: without end, unless the manifest has a rule."""

from __future__ import annotations

__all__ = ["padding_limit"]

import sys

from hdruntime.bundle.manifest import PaddingRule


def padding_limit(rule: PaddingRule | None, tokens: int) -> int:
    """The most tokens that a row may be padded to with its answer as it was; ``sys.maxsize`` where there is no limit.

    Lengths of one limit may share a batch.

    Args:
        rule: the bundle's.
        tokens: of the row, 1 or more, padding that is part of the question included.
    """
    if rule is None:
        return sys.maxsize
    return max(-(-tokens // rule.multiple_of) * rule.multiple_of, rule.free_up_to)
