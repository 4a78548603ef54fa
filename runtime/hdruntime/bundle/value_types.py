"""Types of numbers, texts and choices of a manifest; `hdruntime.bundle.checked_json` refuses others."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta

_MOST_TOKENS = 2**24
"""More than any model has positions for; up to here float32, in which graphs divide by lengths, has every integer."""

_INT32_MAX = 2**31 - 1
"""The largest axis, id or number of layers that the backends index with."""

Length = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
TokenCount = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Size = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
LargeCount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(min_length=1)]


class Choice(str, Enum):
    """One of a closed set of words: its members equal the words, and are printed as them."""

    def __str__(self) -> str:
        return str(self.value)
