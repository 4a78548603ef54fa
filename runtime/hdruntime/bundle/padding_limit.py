"""How far rows may be padded before their answers change: without limit, unless the manifest has a rule."""

from __future__ import annotations

__all__ = ["padding_limit"]

import sys

from hdruntime.bundle.manifest import PaddingRule


def padding_limit(rule: PaddingRule | None, tokens: int) -> int:
    """The most tokens to which padding a row leaves its answer unchanged; ``sys.maxsize`` for no limit.

    Rows with the same limit may share a batch.

    Args:
        rule: the bundle's.
        tokens: of the row, 1 or more, including padding that counts.
    """
    if rule is None:
        return sys.maxsize
    return max(-(-tokens // rule.multiple_of) * rule.multiple_of, rule.free_up_to)
