"""Real text that is everywhere: the topics of Python's own help."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

HELP = "\n".join(topics.values())


def tokenizer_of(file: Path) -> Any:
    """The tokenizer in a ``tokenizer.json``, which neither cuts nor pads."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
