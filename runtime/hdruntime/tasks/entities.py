"""The entities of texts, by bundles of token-classification."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hdruntime.bundle.manifest import Manifest
from hdruntime.tasks.task import Outputs, Text, TextTask, Values
from hdruntime.text.classes import labels_of
from hdruntime.text.entities import Aggregation, Entity, entities
from hdruntime.text.tokenization import Encoding

if TYPE_CHECKING:
    import pyarrow as pa


class Entities(TextTask):
    """The entities of a text, in order.

    Args:
        manifest: of the bundle.
        tokenizer: the bundle's ``tokenizers.Tokenizer``.
        aggregation: how tokens are grouped.
    """

    outputs = ("logits",)

    def __init__(self, manifest: Manifest, tokenizer: Any, aggregation: Aggregation) -> None:
        super().__init__(manifest)
        self._labels, self._tokenizer, self._aggregation = labels_of(manifest), tokenizer, aggregation

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        place = {"start": pa.int32(), "end": pa.int32()}
        entity = pa.struct({**place, "text": pa.string(), "label": pa.string(), "score": pa.float32()})
        return (pa.field("entities", pa.list_(entity)),)

    def values(self, answer: list[Entity]) -> Values:
        return {"entities": [dataclasses.asdict(entity) for entity in answer]}

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> list[Entity]:
        return entities(
            outputs["logits"],
            self._labels,
            text=text.text,
            encoding=encoding,
            aggregation=self._aggregation,
            tokenizer=self._tokenizer,
        )
