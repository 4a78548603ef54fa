"""What tasks make of outputs, against numbers computed by hand.

Entities and answers are compared with transformers: test_entities.py, test_spans_of_long_texts.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from hdruntime.errors import InputError
from hdruntime.tasks.fill_mask import fillings
from hdruntime.tasks.text_classification import classification
from hdruntime.tasks.text_scoring import text_score
from hdruntime.text.encoding import Encoding
from hdruntime.text.logits import Activation, softmax

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def encoding(*ids: int) -> Encoding:
    return Encoding(list(ids), [0] * len(ids), [(0, 0)] * len(ids), [0] * len(ids))


def test_softmax_of_logarithms_is_their_shares_and_of_huge_logits_finite() -> None:
    np.testing.assert_allclose(softmax(floats(0, LN3)), [0.25, 0.75], rtol=1e-6)
    assert softmax(floats(3e38, -3e38)).tolist() == [1, 0]
    assert softmax(floats(-3e38, -3e38)).tolist() == [0.5, 0.5]


def test_the_class_with_the_largest_logit_wins() -> None:
    found = classification(floats(0, LN2, 0), ["low", "middle", "high"])
    assert found.label == "middle"
    assert found.score == pytest.approx(0.5, rel=1e-6)
    assert found.scores == pytest.approx({"low": 0.25, "middle": 0.5, "high": 0.25}, rel=1e-6)


def test_independent_classes_have_independent_scores() -> None:
    found = classification(floats(LN3, LN3), ["a", "b"], activation=Activation.SIGMOID)
    assert found.label == "a"
    assert found.scores == pytest.approx({"a": 0.75, "b": 0.75}, rel=1e-6)
    assert classification(floats(-1e30), ["a"], activation=Activation.SIGMOID).score == 0


def test_a_regression_gives_the_number_itself_with_no_digits_that_float32_does_not_have() -> None:
    assert str(classification(floats(0.1), ["stars"], activation=Activation.IDENTITY).score) == "0.1"


def spelling(token_id: int) -> str:
    return "[MASK]" if token_id == 7 else f"word{token_id}"


def test_each_mask_gets_its_best_tokens_best_first() -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[1, [2, 5]] = LN2, LN4
    logits[2, 0] = 1
    first, second = fillings(logits, mask_token_id=7, spelling=spelling, encoding=encoding(1, 7, 7, 2))
    # Weights 4, 2 and six times 1; of equals the smaller id comes first.
    assert [filling.token_id for filling in first] == [5, 2, 0, 1, 3]
    assert [filling.token for filling in first] == ["word5", "word2", "word0", "word1", "word3"]
    assert [filling.score for filling in first] == pytest.approx([4 / 12, 2 / 12, 1 / 12, 1 / 12, 1 / 12], rel=1e-6)
    assert second[0].token_id == 0
    (few,) = fillings(np.zeros((1, 3), np.float32), mask_token_id=7, spelling=spelling, encoding=encoding(7))
    assert len(few) == 3, "a small vocabulary"


def test_a_text_without_a_mask_is_refused_with_how_to_write_one() -> None:
    with pytest.raises(InputError, match=r"no mask to fill.\nWrite \[MASK\] in place of a word"):
        fillings(np.zeros((1, 3), np.float32), mask_token_id=7, spelling=spelling, encoding=encoding(1))


def test_a_text_of_one_token_has_no_perplexity() -> None:
    found = text_score(np.zeros(1, np.float32))
    assert (found.log_probability, found.perplexity, found.log_probabilities) == (0, None, [0])
