"""A session on the TensorRT backend: texts in any order and number, in the memory there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hdruntime.bundle.manifest import PaddingRule, ProfileShape
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendUnavailableError, NonFiniteOutputError, OutOfMemoryError
from hdruntime.inference.scheduling import PaddingCount
from hdruntime.session import Encoding, Session
from support.comparators import assert_close

HIDDEN = "last_hidden_state"
PROFILES = (ProfileShape(batch=(1, 1, 8), tokens=(1, 32, 32)), ProfileShape(batch=(1, 1, 4), tokens=(1, 200, 200)))
BIGBIRD = PaddingRule(multiple_of=20, free_up_to=40)


def encodings(lengths: Sequence[int], seed: int = 0) -> list[Encoding]:
    generator = np.random.default_rng(seed)
    return [
        Encoding(
            input_ids=generator.integers(0, 9, length).tolist(),
            token_type_ids=[0] * length,
            offsets=[(0, 0)] * length,
            sequence_ids=[0] * length,
        )
        for length in lengths
    ]


def check(machine: Any, given: Sequence[Encoding], results: Sequence[dict[str, np.ndarray]]) -> None:
    assert len(given) == len(results)
    for encoding, result in zip(given, results, strict=True):
        expected = machine.model(np.array([encoding.input_ids]), padding=machine.bundle.manifest.padding)[0]
        assert_close(result[HIDDEN], expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_texts_of_all_lengths_get_their_answers_in_order(graphs: str, seed: int, new_machine: Any) -> None:
    machine = new_machine(seed)
    session = Session(machine.bundle, machine.runner(graphs=graphs))
    given = encodings(np.random.default_rng(seed).integers(1, 201, 60).tolist(), seed)
    check(machine, given, session.infer(given, batch_tokens=400))
    assert session.max_len == 200


@pytest.mark.parametrize("seed", range(4))
def test_batches_are_halved_until_they_fit(seed: int, new_machine: Any) -> None:
    machine = new_machine(seed)
    machine.trt.scratch_bytes = 2000
    session = Session(machine.bundle, machine.runner())
    # Two rows of 200 tokens fit, four do not.
    machine.device.free_bytes = 1_300_000
    given = encodings([200] * 7 + [150] * 5 + [20] * 9, seed)
    check(machine, given, session.infer(given, batch_tokens=800))
    assert (2, 200) in machine.trt.shapes_run
    assert (4, 200) not in machine.trt.shapes_run


def test_a_text_that_never_fits_is_told(new_machine: Any) -> None:
    machine = new_machine()
    machine.trt.scratch_bytes = 2000
    session = Session(machine.bundle, machine.runner())
    machine.device.free_bytes = 200_000
    with pytest.raises(OutOfMemoryError):
        session.infer(encodings([200]))
    given = encodings([9, 20])
    check(machine, given, session.infer(given))


def test_a_batch_of_more_rows_than_any_profile_takes_is_run_in_parts(machine: Any) -> None:
    session = Session(machine.bundle, machine.runner())
    ids = np.random.default_rng(0).integers(0, 9, (19, 30))
    machine.check({"input_ids": ids, "attention_mask": np.ones_like(ids)}, session(input_ids=ids))
    assert max(batch for batch, _ in machine.trt.shapes_run) == 8


def test_a_text_whose_answer_is_nan_is_named(machine: Any) -> None:
    session = Session(machine.bundle, machine.runner())
    given = encodings([20, 30, 25])
    given[1].input_ids[3] = 9
    with pytest.raises(NonFiniteOutputError, match="in rows 1"):
        session.infer(given)


def test_padding_to_the_steps_of_an_engine_is_counted(machine: Any) -> None:
    session = Session(machine.bundle, machine.runner())
    session.infer(encodings([17, 20, 33]), batch_tokens=40)
    computed = sum(batch * tokens for batch, tokens in machine.trt.shapes_run)
    assert computed > 2 * 20 + 33, "no batch was padded beyond its longest row"
    assert session.padding == PaddingCount(tokens=70, padded_tokens=computed - 70)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_where_padding_changes_answers_texts_answer_as_they_do_alone(graphs: str, new_machine: Any) -> None:
    machine = new_machine(profiles=PROFILES, padding=BIGBIRD)
    session = Session(machine.bundle, machine.runner(graphs=graphs))
    given = encodings([*range(1, 201, 3), *range(195, 201), *range(36, 45)])
    check(machine, given, session.infer(given))
    computed = sum(batch * tokens for batch, tokens in machine.trt.shapes_run)
    # Graphs are checked by running a batch again.
    assert graphs == "on" or session.padding.tokens + session.padding.padded_tokens == computed
    assert max(batch for batch, _ in machine.trt.shapes_run) == 8, "texts do share batches"


@pytest.mark.parametrize("padding", ["right", "left", "holes", "all"])
def test_where_padding_changes_answers_a_batch_is_answered_as_it_is_given(
    padding: str, new_machine: Any, new_batch: Any
) -> None:
    machine = new_machine(profiles=PROFILES, padding=BIGBIRD)
    session = Session(machine.bundle, machine.runner())
    for tokens in (20, 32, 33, 40, 41, 60, 61, 181, 200):
        # Five rows of more than 32 tokens run in parts, which are no narrower.
        batch = new_batch(5, tokens, padding)
        machine.check(batch, session(**batch))
        assert session.most_rows(tokens) == (8 if tokens <= 32 else 4)


def test_padding_to_the_steps_of_an_engine_would_be_noticed(new_machine: Any, new_batch: Any) -> None:
    machine = new_machine(profiles=PROFILES, padding=BIGBIRD)
    by_row = dataclasses.replace(machine.bundle.manifest, padding=None)
    bundle, machine.bundle = machine.bundle, Bundle(machine.bundle.path, by_row)
    session = Session(machine.bundle, machine.runner())
    machine.bundle = bundle
    batch = new_batch(2, 60, "none")
    with pytest.raises(AssertionError):
        machine.check(batch, session(**batch))


def test_an_engine_that_pads_too_far_is_refused(new_machine: Any) -> None:
    machine = new_machine(profiles=(ProfileShape(batch=(1, 1, 8), tokens=(64, 128, 200)),), padding=BIGBIRD)
    with pytest.raises(BackendUnavailableError, match=r"(?s)40 tokens only with .* --bigbird-last-block row"):
        machine.runner()
