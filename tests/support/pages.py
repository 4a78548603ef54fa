"""The repository's pages in Markdown, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


class CodeBlock(NamedTuple):
    """A fenced block: its language, the file it is to be saved as, and its text."""

    language: str
    title: str
    code: str


def page(path: str) -> str:
    """The text of a page, by its path from the root."""
    return (ROOT / path).read_text(encoding="utf-8")


def code_blocks(text: str, language: str | None = None) -> list[CodeBlock]:
    """The fenced blocks of a page, or the blocks of one language, in order."""
    found = [CodeBlock(*match.groups(default="")) for match in _BLOCK.finditer(text)]
    return [block for block in found if language in (None, block.language)]
