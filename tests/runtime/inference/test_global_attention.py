"""The input `global_attention_mask` gets its default, is checked, and reaches the graph.

The bundle's model returns its input, so its answers are the marks themselves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import Default, Fill, Role, TensorSpec
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError
from hdruntime.session import Session
from support.commands import run_here
from support.comparators import named_case
from support.onnx_models import parsed_model

PADDING, SEPARATOR = 0, 3
BOUND = 4
FIRST_TOKEN = Default(fill=Fill.FIRST_TOKEN)
QUESTION = Default(fill=Fill.UNTIL_TOKEN, token_id=SEPARATOR)
OUTPUTS = {
    "feature-extraction": {"last_hidden_state": ("batch", "tokens", 1)},
    "question-answering": {"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")},
}

Sessions = Callable[[Default], Session]


@pytest.fixture
def marking_bundle(new_bundle: Callable[..., Path]) -> Callable[[Default], Path]:
    """Make a bundle whose outputs are its `global_attention_mask` as float32; questions are for that task."""

    def make(default: Default) -> Path:
        task = "feature-extraction" if default is FIRST_TOKEN else "question-answering"
        path = new_bundle(task)
        plain = open_bundle(path).manifest
        write_echo(path / "model.onnx", OUTPUTS[task])
        marks = dataclasses.replace(
            plain.inputs[1], name="global_attention_mask", role=Role.GLOBAL_ATTENTION_MASK, default=default, bound=BOUND
        )
        outputs = tuple(TensorSpec(name=name, dtype="float32", shape=axes) for name, axes in OUTPUTS[task].items())
        changes = {"inputs": (*plain.inputs, marks), "outputs": outputs, "hidden_size": 1, "task": task}
        seal(path, dataclasses.replace(plain, **changes))
        return path

    return make


@pytest.fixture
def marking(marking_bundle: Callable[[Default], Path]) -> Sessions:
    """Load such a bundle."""
    return lambda default: hdruntime.load(marking_bundle(default))


def write_echo(path: Path, outputs: dict[str, tuple[str | int, ...]]) -> None:
    """A model that reads all its inputs and returns its `global_attention_mask` as every output."""
    nodes = """
        read = Add(input_ids, attention_mask)
        nothing = Sub(read, read)
        marks = Add(global_attention_mask, nothing)
        flat = Cast<to: int = 1>(marks)
    """
    for name, axes in outputs.items():
        nodes += f"{name} = {'Unsqueeze(flat, last_axis)' if len(axes) == 3 else 'Identity(flat)'}\n"
    inputs = dict.fromkeys(("input_ids", "attention_mask", "global_attention_mask"), "int64[batch, tokens]")
    shapes = {name: f"float[{', '.join(map(str, axes))}]" for name, axes in outputs.items()}
    onnx.save(parsed_model(inputs, shapes, nodes, {"last_axis": [2]}), path)


def marks_of(outputs: dict[str, np.ndarray]) -> list[list[int]]:
    """The marks, rows of 0 and 1."""
    values = next(iter(outputs.values()))
    return values.reshape(values.shape[:2]).astype(int).tolist()


# One batch


def test_the_first_real_token_is_marked(marking: Sessions) -> None:
    """With padding on the right, on the left, in holes, and with nothing but padding."""
    session = marking(FIRST_TOKEN)
    mask = [[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]
    expected = [[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert marks_of(session(input_ids=[[4, 5, 6, 7]] * 4, attention_mask=mask)) == expected
    assert marks_of(session(input_ids=[[4, 5, 6, 7]])) == [[1, 0, 0, 0]]


def test_the_tokens_before_the_first_separator_are_marked(marking: Sessions) -> None:
    """A pair, no question, and one that is as long as the bound."""
    session = marking(QUESTION)
    for input_ids, expected in (
        ([2, 4, 5, SEPARATOR, SEPARATOR, 6, 7, SEPARATOR], [1, 1, 1, 0, 0, 0, 0, 0]),
        ([SEPARATOR, 4, 5, SEPARATOR], [0, 0, 0, 0]),
        ([2, 4, 5, 6, SEPARATOR], [1, 1, 1, 1, 0]),
    ):
        assert marks_of(session(input_ids=[input_ids])) == [expected]


def test_a_separator_in_the_padding_ends_no_question(marking: Sessions) -> None:
    session = marking(QUESTION)
    got = session(
        input_ids=[[SEPARATOR, 2, 4, SEPARATOR, 5], [2, 4, SEPARATOR, SEPARATOR, 5], [5, 5, 5, 5, 5]],
        attention_mask=[[0, 1, 1, 1, 1], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0]],
    )
    assert marks_of(got) == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("default", [FIRST_TOKEN, QUESTION], ids=["first token", "question"])
def test_the_graph_gets_the_callers_marks(marking: Sessions, default: Default) -> None:
    session = marking(default)
    marks = [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]]
    for given in (marks, np.array(marks, np.int32), np.array(marks, bool)):
        # Without a separator: a caller's marks need none.
        assert marks_of(session(input_ids=[[4] * 5] * 2, global_attention_mask=given)) == marks
    left_out = session(input_ids=[[2, SEPARATOR, 4]], global_attention_mask=None)
    assert marks_of(left_out) == [[1, 0, 0]]


def test_marks_on_padding_do_not_count(marking: Sessions) -> None:
    session = marking(FIRST_TOKEN)
    inputs = {"input_ids": [[4] * 8], "attention_mask": [[1, 1, 1, 1, 0, 0, 0, 0]]}
    got = session(**inputs, global_attention_mask=[[1] * 8])
    assert marks_of(got)[0][:BOUND] == [1] * BOUND
    with pytest.raises(InputError, match="has 5 global tokens in row 0"):
        session(input_ids=[[4] * 8], global_attention_mask=[[1] * 5 + [0] * 3])


INVALID_MARKS = [
    (
        [[0] * 6, [1] * 5 + [0]],
        r"has 5 global tokens in row 1; this bundle accepts 4\.\nReduce them, or build "
        r"the bundle again with max_global=5\.",
    ),
    ([[0, 2, 0, 0, 0, 0]] * 2, r"global_attention_mask\[0, 1\] is 2; it must be 1 for global tokens and 0"),
    ([[0.5] * 6] * 2, "global_attention_mask is of type float64"),
    ([[1, 0]] * 2, r"global_attention_mask has shape \[2, 2\], but input_ids \[2, 6\]"),
]


def test_invalid_marks_are_refused(marking: Sessions) -> None:
    for marks, message in INVALID_MARKS:
        with named_case(message), pytest.raises(InputError, match=message):
            marking(FIRST_TOKEN)(input_ids=[[4] * 6] * 2, global_attention_mask=marks)


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        (
            [[4, SEPARATOR], [4, 5]],
            r"The end of the question of row 1 is unknown: there is no separator \(id 3\)\.\n"
            r"Encode question and context as a pair, or pass global_attention_mask\.",
        ),
        (
            [[4] * 5 + [SEPARATOR]],
            r"The question of row 0 has 5 tokens, which are all global; this bundle accepts 4\.\n"
            r"Shorten it, pass global_attention_mask, or build the bundle again with max_global=5\.",
        ),
    ],
    ids=["no separator", "too long"],
)
def test_an_invalid_question_is_refused_with_advice(marking: Sessions, input_ids: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        marking(QUESTION)(input_ids=input_ids)


# Texts


def test_texts_of_any_length_are_marked_in_any_batch(marking: Sessions) -> None:
    session = marking(FIRST_TOKEN)
    texts = ["long documents are read", "", "whole"]
    encodings = session.tokenize(texts)
    for batch_tokens in (1, 64):
        results = session.infer(encodings, batch_tokens=batch_tokens)
        got = [result["last_hidden_state"][:, 0].astype(int).tolist() for result in results]
        assert got == [[1, 0, 0, 0, 0, 0], [1, 0], [1, 0, 0]]
    # The mean of the marks: one token of each text.
    np.testing.assert_allclose(session.embed(texts)[:, 0], [1 / 6, 1 / 2, 1 / 3], rtol=1e-6)


def test_a_question_that_is_too_long_has_the_callers_number(marking: Sessions) -> None:
    session = marking(QUESTION)
    encodings = session.tokenize(["long", "are", "read documents are whole"], ["whole documents"] * 3)
    # Batches put the longest first: in its batch it is row 0.
    with pytest.raises(InputError, match=r"The question of text 2 has 5 tokens"):
        session.infer(encodings, batch_tokens=1)
    with pytest.raises(InputError, match=r"The question of the text has 5 tokens"):
        session.infer(encodings[2:])


def test_a_job_marks_questions_and_continues_after_one_that_is_too_long(
    marking_bundle: Callable[[Default], Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    pairs = [("long", "documents are read"), ("read documents are whole", "long"), ("are", "whole documents")]
    rows.write_text("".join(json.dumps({"q": question, "c": context}) + "\n" for question, context in pairs))
    output = tmp_path / "out.jsonl"
    command = ["run", marking_bundle(QUESTION), rows, "-o", output, "--text-column", "q", "--text-pair-column", "c"]
    done = run_here(*command)
    assert done.returncode == 2, done.stderr
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["error"] for row in results] == [
        None,
        "The question of the text has 5 tokens, which are all global; this bundle accepts 4.\n"
        "Shorten it, pass global_attention_mask, or build the bundle again with --max-global 5.",
        None,
    ]
    # No token of a context is marked, so all are equally good and the first of them is the answer.
    assert [row["answer"] for row in results] == ["documents", None, "whole"]
