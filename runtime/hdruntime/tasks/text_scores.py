"""How probable texts are, by bundles of text-scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdruntime.tasks.task import Outputs, Text, TextTask, Values
from hdruntime.text.logits import TextScore, text_score
from hdruntime.text.tokenization import Encoding

if TYPE_CHECKING:
    import pyarrow as pa


class TextScores(TextTask):
    """The log-probability of a text and of each token."""

    outputs = ("log_probabilities",)
    # The first token of a piece that is run by itself would have no score.
    splits = False

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        numbers = {"log_probability": pa.float64(), "perplexity": pa.float64()}
        return tuple(pa.schema({**numbers, "log_probabilities": pa.list_(pa.float32())}))

    def values(self, answer: TextScore) -> Values:
        return vars(answer)

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> TextScore:
        return text_score(outputs["log_probabilities"])
