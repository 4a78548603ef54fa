"""The work of disentangled attention is that of dense attention: distances beyond the reach are seen, too."""

from __future__ import annotations

from hdplugins.attention.dense.pairs import pairs as pairs
