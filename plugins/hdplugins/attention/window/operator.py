"""Sliding-window attention with global tokens: a query sees the tokens around it, and the global tokens anywhere.

Global *columns*, the keys that every query sees, are part of the operator. Global *rows* are not: the query of a global
token is an ordinary row here. In Longformer these rows see the whole sequence, through separate projections.
The family's graph computes them with standard operators and overwrites the operator's rows: G x tokens of dense
attention, linear in tokens for a bounded G. Inside the operator, every block of queries would have to carry a second
set of keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hdplugins.attention.operator import Operator

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def pairs(attributes: Mapping[str, Any], *, tokens: int, heads: int) -> int:
    """Queries with the keys of their window, and with the global tokens beyond it; see `Operator.pairs`.

    The query of a global token counts like any other query.

    Raises:
        ValueError: a dilation that does not fit the heads, or more global tokens than the bound or the sequence has.
    """
    left, right = attributes["left"], attributes["right"]
    steps = Counter(steps_of_heads(attributes["dilation"], heads))
    global_tokens, most = attributes.get("global_tokens", 0), min(tokens, attributes["global_bound"])
    if not 0 <= global_tokens <= most:
        raise ValueError(f"{global_tokens} global tokens: a sequence of {tokens} tokens may have 0 to {most} here.")
    return sum(count * _pairs_of_head(tokens, global_tokens, left, right, step) for step, count in steps.items())


def _pairs_of_head(tokens: int, global_tokens: int, left: int, right: int, step: int) -> int:
    import numpy as np

    query = np.arange(tokens, dtype=np.int64)
    in_window = _keys_in_window(query, tokens, left, right, step)
    global_in_window = _keys_in_window(query, global_tokens, left, right, step)
    return int((in_window + global_tokens - global_in_window).sum())


def _keys_in_window(query: npt.NDArray[np.int64], end: int, left: int, right: int, step: int) -> npt.NDArray[np.int64]:
    """How many of the first `end` tokens are ``query + step * s`` for an s in -left..right; [tokens]."""
    import numpy as np

    first = np.maximum(-left, -(query // step))
    last = np.minimum(right, (end - 1 - query) // step)
    return np.maximum(0, last - first + 1)


def steps_of_heads(dilation: Sequence[int], heads: int) -> list[int]:
    """The dilation of each head; a ValueError says that it does not fit the heads."""
    if len(dilation) not in (1, heads) or min(dilation) < 1:
        raise ValueError(f"The dilation {list(dilation)} does not fit {heads} heads: one value of 1 or more per head.")
    return list(dilation) * (heads // len(dilation))


OPERATOR = Operator(
    name="SlidingWindowAttention",
    version=2,
    package=__package__,
    inputs=("query", "key", "value", "token_kind"),
    groups_heads=True,
    attributes=dict.fromkeys(("left", "right", "dilation", "global_bound", "scale")),
    pairs=pairs,
)
