"""Encodings of texts and pairs that a chat template wraps."""

from __future__ import annotations

import bisect
import operator
from typing import Any

from hdruntime.bundle.sentence_settings import PairTemplate, Slot, TextTemplate, Written
from hdruntime.text.encoding import Encoding, SequenceIds

Template = PairTemplate | TextTemplate


def template_encoding(item: Any, written: Written, suffix: list[int]) -> Encoding:
    """The encoding of a text or a pair in a template.

    Args:
        item: ``tokenizers.Encoding`` of the template with its texts.
        written: character ranges of text, query and document in the template.
        suffix: ids that replace the last ids of a truncated template.
    """
    ids, spans = item.ids, item.offsets
    sequences: SequenceIds = [None] * len(ids)
    offsets = [(0, 0)] * len(ids)
    # A token with characters of both belongs to the query, which every chunk of the document has.
    numbers: tuple[tuple[int, Slot], ...] = ((1, "document"), (0, "query"), (0, "text"))
    for number, slot in numbers:
        start, end = written.places.get(slot, (0, 0))
        if start == end:
            continue
        first = bisect.bisect_right(spans, start, key=operator.itemgetter(1))
        last = bisect.bisect_left(spans, end, lo=first, key=operator.itemgetter(0))
        sequences[first:last] = [number] * (last - first)
        offsets[first:last] = [(max(a, start) - start, min(b, end) - start) for a, b in spans[first:last]]
    kept = len(ids) - min(len(suffix), len(ids))
    if suffix:
        ids[kept:] = suffix[len(suffix) - (len(ids) - kept) :]
        sequences[kept:] = [None] * (len(ids) - kept)
        offsets[kept:] = [(0, 0)] * (len(ids) - kept)
    rest = item.overflowing
    given_tokens = len(ids) + sum(map(len, rest))
    return Encoding(ids, item.type_ids, offsets, sequences, is_truncated=bool(rest), given_tokens=given_tokens)


def template_suffix(tokenizer: Any, template: Template, prompt: str) -> list[int]:
    """The ids at the end of a template: the common suffix of two texts or pairs, as in sentence-transformers."""
    first, second = (
        tokenizer.encode(template.write(*texts, prompt=prompt).text, add_special_tokens=False).ids
        for texts in ([text] * (1 if isinstance(template, TextTemplate) else 2) for text in ("0", "1 2 3 4"))
    )
    equal = [one == other for one, other in zip(reversed(first), reversed(second), strict=False)]
    shared = equal.index(False) if False in equal else 0
    return list(first[len(first) - shared :])
