"""The entities of texts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.tasks.task import Outputs, TaskOptions, Text, TextTask, Values
from hdruntime.text.encoding import Encoding
from hdruntime.text.entities import Aggregation, Entity, entities
from hdruntime.text.logits import labels_of
from hdruntime.text.tokenizer_file import read_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


class Entities(TextTask):
    """The entities of a text, in order; `tokenizer` is the bundle's ``tokenizers.Tokenizer``.

    Attributes:
        aggregation: grouping of tokens to entities.
    """

    name = Task.TOKEN_CLASSIFICATION
    job_options = ("aggregation",)
    needs_text = True

    def __init__(self, manifest: Manifest, tokenizer: Any, aggregation: Aggregation) -> None:
        super().__init__(manifest)
        self._labels, self._tokenizer, self.aggregation = labels_of(manifest), tokenizer, aggregation

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> Entities:
        info = bundle.manifest.tokenizer
        assert info is not None, "the bundle of a task that needs texts has one"
        return cls(bundle.manifest, read_tokenizer(bundle.file(info.file)), options.aggregation or Aggregation.NONE)

    def aggregated(self, aggregation: Aggregation) -> Entities:
        """The same task with another grouping."""
        return Entities(self.manifest, self._tokenizer, aggregation)

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
            aggregation=self.aggregation,
            tokenizer=self._tokenizer,
        )


TASK = Entities
