"""Texts of what tokenizers treat in their own ways."""

from __future__ import annotations

import random

PARTS = (
    *("the", "river", "flows", "through", "Berlin", "who", "wrote", "it", "don't", "Ada,", "(1815)", "e-mail@x.org"),
    *(
        "3.14159",
        "1234567890123",
        "ΣΑΣ",
        "ﬁne",
        "é",
        "e\u0301\u0302",
        "한국어",
        "\u1112\u1161\u11ab",
        "漢字かな交じり文。",
        "ไทย",
    ),
    *(
        "👩‍👩‍👧",
        "-----",
        "aaaaaaaa",
        "aaa",
        "x" * 130,
        "<mask>",
        "[SEP]",
        "multi word",
        "\u200b",
        "\x00",
        "İ",
        "▁",
        "Ġ",
    ),
)
SPACES = (*[" "] * 12, "\n", "\n\n", "  ", "    ", "\r\n", "\t", "\u00a0", "\u3000", " \n ", "")
"""What normalizers, pre-tokenizers and models treat in their own ways, next to a cut as well as elsewhere."""


def text_of(parts: int, seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(PARTS) + draw.choice(SPACES) for _ in range(parts))
