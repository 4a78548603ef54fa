"""How probable texts are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Task
from hdruntime.tasks.task import Outputs, Text, TextTask, Values
from hdruntime.text.encoding import Encoding
from hdruntime.text.logits import shortest

if TYPE_CHECKING:
    import pyarrow as pa


class TextScore(NamedTuple):
    """How probable a text is: its log-probability, the perplexity of a token, and each token's log-probability.

    The first token has 0 and does not count: nothing predicts it. A text of one token has no perplexity, None.
    """

    log_probability: float
    perplexity: float | None
    log_probabilities: list[float]


class TextScores(TextTask):
    """The log-probability of a text and of each token."""

    name = Task.TEXT_SCORING
    reads_offsets = False
    # The first token of a chunk that is run by itself would have no score.
    splits = False

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        numbers = {"log_probability": pa.float64(), "perplexity": pa.float64()}
        return tuple(pa.schema({**numbers, "log_probabilities": pa.list_(pa.float32())}))

    def values(self, answer: TextScore) -> Values:
        return answer._asdict()

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> TextScore:
        return text_score(outputs["log_probabilities"])


TASK = TextScores


def text_score(log_probabilities: FloatArray) -> TextScore:
    """The score of a text whose tokens have these log-probabilities: [tokens], float32, 0 for the first."""
    total, predicted = float(log_probabilities.sum(dtype=np.float64)), len(log_probabilities) - 1
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(-total / predicted)) if predicted > 0 else None
    return TextScore(total, perplexity, [shortest(value) for value in log_probabilities])
