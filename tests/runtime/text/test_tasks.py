"""What tasks make of outputs, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hdruntime.errors import InputError
from hdruntime.text.answers import MAX_ANSWER_TOKENS, Answer, AnswerOptions, best_answers
from hdruntime.text.entities import Entity, entities
from hdruntime.text.scores import softmax
from hdruntime.text.splitting import in_one_piece
from hdruntime.text.tasks import (
    Activation,
    Filling,
    classification,
    fillings,
    text_score,
)
from hdruntime.text.tokenization import Encoding

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def encoding(offsets: str, *, ids: list[int] | None = None) -> Encoding:
    """An encoding from a sketch: ``"S 0-4 5-9 S"`` is two ordinary tokens between two special ones."""
    words = offsets.split()
    spans = [(0, 0) if word == "S" else tuple(map(int, word.split("-"))) for word in words]
    return Encoding(
        input_ids=ids or list(range(len(words))),
        token_type_ids=[0] * len(words),
        offsets=spans,  # type: ignore[arg-type]
        sequence_ids=_sequence_ids(words),
    )


def _sequence_ids(words: list[str]) -> list[int | None]:
    """A text starts after special tokens."""
    ids: list[int | None] = []
    text = -1
    for index, word in enumerate(words):
        text += word != "S" and (index == 0 or words[index - 1] == "S")
        ids.append(None if word == "S" else text)
    return ids


def test_softmax_of_logarithms_is_their_shares_and_of_huge_logits_finite() -> None:
    np.testing.assert_allclose(softmax(floats(0, LN3)), [0.25, 0.75], rtol=1e-6)
    assert softmax(floats(3e38, -3e38)).tolist() == [1, 0]
    assert softmax(floats(-3e38, -3e38)).tolist() == [0.5, 0.5]


def test_the_class_with_the_largest_logit_wins() -> None:
    found = classification(floats(0, LN2, 0), ["low", "middle", "high"])
    assert found.label == "middle"
    assert found.score == pytest.approx(0.5, rel=1e-6)
    assert list(found.scores) == ["low", "middle", "high"]
    assert list(found.scores.values()) == pytest.approx([0.25, 0.5, 0.25], rel=1e-6)


def test_independent_classes_have_independent_scores() -> None:
    found = classification(floats(LN3, LN3), ["a", "b"], activation=Activation.SIGMOID)
    assert found.label == "a"
    assert list(found.scores.values()) == pytest.approx([0.75, 0.75], rel=1e-6)


def test_a_regression_gives_the_number_itself_with_no_digits_that_float32_does_not_have() -> None:
    assert str(classification(floats(0.1), ["x"], activation=Activation.IDENTITY).score) == "0.1"
    assert classification(floats(4.1), ["stars"], activation=Activation.IDENTITY).score == 4.1


def test_entities_are_the_labelled_tokens_with_their_characters() -> None:
    # [CLS] Ada met Bob [SEP]; special tokens are skipped whatever their logits say.
    logits = floats([0, 9, 0], [0, LN2, 0], [9, 0, 0], [0, 0, LN4], [0, 9, 0])
    found = entities(logits, ["O", "B", "I"], text="Ada met Bob", encoding=encoding("S 0-3 4-7 8-11 S"))
    assert [(entity.start, entity.end, entity.text, entity.label) for entity in found] == [
        (0, 3, "Ada", "B"),
        (8, 11, "Bob", "I"),
    ]
    assert [entity.score for entity in found] == pytest.approx([1 / 2, 2 / 3], rel=1e-6)
    assert isinstance(found[0], Entity)


def answer(start_logits: np.ndarray, end_logits: np.ndarray, *, context: str, encoding: Encoding) -> Answer:
    outputs = [{"start_logits": start_logits, "end_logits": end_logits}]
    (found,) = best_answers(in_one_piece(encoding), outputs, context=context, options=AnswerOptions())
    return found


CONTEXT = "It is cold in Oslo"
QUESTION_AND_CONTEXT = "S 0-5 S 0-2 3-5 6-10 11-13 14-18 S"


def test_the_answer_is_cut_out_of_the_context() -> None:
    start = floats(0, 0, 0, 0, 0, 0, LN4, 0, 0)
    end = floats(0, 0, 0, 0, 0, 0, 0, LN4, 0)
    found = answer(start, end, context=CONTEXT, encoding=encoding(QUESTION_AND_CONTEXT))
    assert (found.answer, found.start, found.end) == ("in Oslo", 11, 18)
    # Of five context tokens one has weight 4, the others and [CLS] have 1: its share is 4 of 9, at each end.
    assert found.score == pytest.approx(16 / 81, rel=1e-6)


def test_an_answer_never_comes_from_the_question_or_a_special_token() -> None:
    everywhere_else = floats(9, 9, 9, 0, 0, 0, 0, 0, 9)
    found = answer(everywhere_else, everywhere_else, context=CONTEXT, encoding=encoding(QUESTION_AND_CONTEXT))
    assert (found.answer, found.start, found.end) == ("It", 0, 2)


def test_an_answer_never_ends_before_it_starts() -> None:
    start = floats(0, 0, 0, 0, 0, 0, 0, 5, 0)
    end = floats(0, 0, 0, 5, 0, 0, 0, 0, 0)
    found = answer(start, end, context=CONTEXT, encoding=encoding(QUESTION_AND_CONTEXT))
    # Either end alone is best with itself; of equal spans the earliest is taken.
    assert found.answer == "It"


def test_an_answer_is_no_longer_than_the_limit() -> None:
    words = " ".join(f"{2 * i}-{2 * i + 1}" for i in range(40))
    for length, reached in ((MAX_ANSWER_TOKENS, True), (MAX_ANSWER_TOKENS + 1, False)):
        start, end = np.zeros(43, np.float32), np.zeros(43, np.float32)
        start[3], end[3 + length - 1] = 5, 5
        found = answer(start, end, context="x " * 40, encoding=encoding(f"S 0-1 S {words}"))
        assert (len(found.answer.split()) == length) is reached


def test_an_empty_context_has_no_answer() -> None:
    logits = floats(0, 9, 0, 0)
    assert answer(logits, logits, context="", encoding=encoding("S 0-5 S S")) == Answer("", 0, 0, 0.0)


def spelling(token_id: int) -> str:
    return "[MASK]" if token_id == 7 else f"word{token_id}"


def test_each_mask_gets_its_best_tokens_best_first() -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[1, [2, 5]] = LN2, LN4
    logits[2, 0] = 1
    found = fillings(logits, mask_token_id=7, spelling=spelling, encoding=encoding("S 0-6 7-13 S", ids=[1, 7, 7, 2]))
    assert len(found) == 2
    # Weights 4, 2 and six times 1; of equals the smaller id comes first.
    assert [(filling.token, filling.token_id) for filling in found[0]] == [
        ("word5", 5),
        ("word2", 2),
        ("word0", 0),
        ("word1", 1),
        ("word3", 3),
    ]
    assert [filling.score for filling in found[0]] == pytest.approx([4 / 12, 2 / 12, 1 / 12, 1 / 12, 1 / 12], rel=1e-6)
    assert found[1][0].token_id == 0
    assert isinstance(found[1][0], Filling)


def test_a_text_without_a_mask_is_refused_with_how_to_write_one() -> None:
    with pytest.raises(InputError, match=r"no mask to fill.\nWrite \[MASK\] in place of a word"):
        fillings(
            np.zeros((1, 3), np.float32),
            mask_token_id=7,
            spelling=spelling,
            encoding=encoding("0-6", ids=[1]),
        )


def test_a_text_of_one_token_has_no_perplexity() -> None:
    found = text_score(np.zeros(1, np.float32))
    assert (found.log_probability, found.perplexity, found.log_probabilities) == (0, None, [0])
