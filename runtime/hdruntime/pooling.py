"""From token vectors to one vector a text."""

from __future__ import annotations

__all__ = ["mean_over_tokens"]

import numpy as np
import numpy.typing as npt


def mean_over_tokens(
    hidden_states: npt.NDArray[np.float32], attention_mask: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The mean of each row's real tokens; what padded positions hold does not matter.

    Args:
        hidden_states: float32 [batch, tokens, hidden_size].
        attention_mask: [batch, tokens], 1 for real tokens, 0 for padding.

    Returns:
        float32 [batch, hidden_size]; zeros for a row without real tokens.
    """
    real = attention_mask.astype(bool)[:, :, np.newaxis]
    # A float32 sum over thousands of tokens loses digits; `where` keeps a NaN in the padding out.
    total = np.sum(hidden_states, axis=1, dtype=np.float64, where=real)
    count = np.maximum(real.sum(axis=1), 1)
    return (total / count).astype(np.float32)
