"""How the series of a benchmark are distinguished: by colour, and without it by dash and shape."""

from __future__ import annotations

from dataclasses import dataclass

LIGHT_COLOURS = ("#0068a8", "#d95f02", "#6c12f3", "#1ea0a9", "#5c2805", "#183f49")
"""Colours on white. Found by a search for colours that stay apart in normal vision and in the three kinds of colour
blindness (simulated after Machado et al. 2009), each with a contrast of at least 3 with its background."""

DARK_COLOURS = ("#5ab4f0", "#ff9147", "#5f73f7", "#329574", "#e4f312", "#99fab3")
"""The same colours on the page's dark background."""

_DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (13, 4), (4, 2, 1, 2, 1, 2))
"""Pixels of line and gap, alternating."""

_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
"""Vega's names."""


@dataclass(frozen=True, kw_only=True)
class SeriesStyle:
    """How a series is drawn.

    Attributes:
        colour: number of its colour.
        dash: pixels of line and gap, alternating.
        shape: of its points, Vega's name.
    """

    colour: int
    dash: tuple[int, ...]
    shape: str

    @classmethod
    def of(cls, index: int) -> SeriesStyle:
        """The style of the series of that number. Colour, dash and shape have six values each; 36 styles differ."""
        lap = index // len(LIGHT_COLOURS)
        return cls(
            colour=index % len(LIGHT_COLOURS),
            dash=_DASHES[(index + lap) % len(_DASHES)],
            shape=_SHAPES[(index + lap) % len(_SHAPES)],
        )
