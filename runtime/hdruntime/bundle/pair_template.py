"""Pairs of texts written as one text, by the chat template of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hdruntime.errors import InputError

Slot = Literal["prompt", "query", "document"]
"""The texts that a template has a place for."""


@dataclass(frozen=True, kw_only=True)
class TemplatePart:
    """A text's place, and the template's text before it."""

    before: str
    slot: Slot


@dataclass(frozen=True, kw_only=True)
class WrittenPair:
    """A pair as one text.

    Attributes:
        text: all of it.
        places: of each text in it, (start, end) in characters.
    """

    text: str
    places: Mapping[Slot, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The text of a template.

    Attributes:
        parts: the places in their order, each once.
        after: the template's text after the last place.
    """

    parts: tuple[TemplatePart, ...]
    after: str

    def write(self, texts: Mapping[Slot, str]) -> WrittenPair:
        """A pair as one text.

        Args:
            texts: of every slot; texts that have no place are left out.
        """
        pieces: list[str] = []
        places: dict[Slot, tuple[int, int]] = {}
        size = 0
        for part in self.parts:
            start = size + len(part.before)
            size = start + len(texts[part.slot])
            pieces += part.before, texts[part.slot]
            places[part.slot] = start, size
        return WrittenPair(text="".join((*pieces, self.after)), places=places)


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """How a pair is written as one text, which the tokenizer reads without special tokens of its own.

    Attributes:
        plain: without a prompt.
        prompted: with a prompt, for which it may have no place: it is then left out, as the template does; None where
            the template refuses prompts.
    """

    plain: Wording
    prompted: Wording | None

    def write(self, query: str, document: str, *, prompt: str = "") -> WrittenPair:
        """A pair as one text.

        Raises:
            InputError: there is a prompt, and the template refuses prompts.
        """
        wording = self.prompted if prompt else self.plain
        if wording is None:
            raise InputError(
                f"The prompt is {prompt!r:.60}, and the chat template that this bundle's pairs are written by takes "
                "none.\nLeave it out, or give an empty one."
            )
        return wording.write({"prompt": prompt, "query": query, "document": document})
