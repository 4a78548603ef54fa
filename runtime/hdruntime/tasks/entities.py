"""The entities of texts, by bundles of token-classification."""

from __future__ import annotations

__all__ = ["entities"]

from collections.abc import Sequence

from hdruntime.inference.text_runner import TextRunner
from hdruntime.tasks.checks import check_task
from hdruntime.text.checks import checked_choice
from hdruntime.text.entities import Aggregation, Entity, EntityFinder
from hdruntime.text.splitting import SplitPooling, merged
from hdruntime.text.tokenization import Overflow


def entities(
    runner: TextRunner,
    texts: Sequence[str],
    *,
    aggregation: Aggregation | str,
    overflow: Overflow | str,
    stride: int,
    batch_tokens: int | None,
) -> list[list[Entity]]:
    """See :meth:`hdruntime.Session.entities`."""
    check_task(runner.manifest, "token-classification", method="entities", overflow=overflow)
    aggregation = checked_choice(Aggregation, aggregation, option="aggregation")
    splits = runner.pieces(texts, overflow=overflow, stride=stride)
    find = EntityFinder(runner.manifest, runner.tokenizer.whole, aggregation)
    found = []
    of_pieces = runner.outputs_of_pieces(splits, ["logits"], batch_tokens=batch_tokens)
    for text, split, outputs in zip(texts, splits, of_pieces, strict=True):
        whole = merged(split, outputs, specs=runner.manifest.outputs, pooling=SplitPooling.MEAN)
        found.append(find(whole["logits"], text=text, encoding=split.whole))
    return found
