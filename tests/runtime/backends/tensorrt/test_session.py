"""A session on the TensorRT backend: texts in any order and number, in the available memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fakes.machine import HIDDEN, Machine, MachineMaker, new_batch
from hdruntime.bundle.manifest import PaddingRule, ProfileShape
from hdruntime.errors import BackendUnavailableError
from hdruntime.inference.scheduling import PaddingCount
from hdruntime.text.encoding import Encoding
from support.comparators import named_case

PROFILES = (ProfileShape(batch=(1, 1, 8), tokens=(1, 32, 32)), ProfileShape(batch=(1, 1, 4), tokens=(1, 200, 200)))
BIGBIRD = PaddingRule(multiple_of=20, free_up_to=40)


def encodings(lengths: Sequence[int], seed: int = 0) -> list[Encoding]:
    ids = np.random.default_rng(seed).integers
    return [Encoding(ids(0, 9, n).tolist(), [0] * n, [(0, 0)] * n, [0] * n) for n in lengths]


def check(machine: Machine, given: Sequence[Encoding], results: Sequence[dict[str, np.ndarray]]) -> None:
    assert len(given) == len(results)
    for encoding, result in zip(given, results, strict=True):
        inputs = {"input_ids": np.array([encoding.input_ids]), "attention_mask": np.ones((1, len(encoding)), int)}
        machine.check(inputs, {HIDDEN: result[HIDDEN][np.newaxis]})


def test_texts_of_all_lengths_get_their_answers_in_order(new_machine: MachineMaker) -> None:
    for graphs, seed in [("on", 0), ("on", 1), ("off", 2), ("off", 3)]:
        with named_case(graphs, seed):
            machine = new_machine(seed)
            session = machine.session(graphs=graphs)
            given = encodings(np.random.default_rng(seed).integers(1, 201, 60).tolist(), seed)
            check(machine, given, session.infer(given, batch_tokens=400))
            assert session.max_len == 200


def test_batches_are_halved_until_they_fit(new_machine: MachineMaker) -> None:
    for seed in range(4):
        with named_case(seed):
            machine = new_machine(seed)
            machine.trt.scratch_bytes = 2000
            session = machine.session()
            # Two rows of 200 tokens fit, four do not.
            machine.device.free_bytes = 1_300_000
            given = encodings([200] * 7 + [150] * 5 + [20] * 9, seed)
            check(machine, given, session.infer(given, batch_tokens=800))
            assert (2, 200) in machine.trt.shapes_run
            assert (4, 200) not in machine.trt.shapes_run


def test_a_batch_of_more_rows_than_any_profile_runs_in_parts(machine: Machine) -> None:
    session = machine.session()
    ids = np.random.default_rng(0).integers(0, 9, (19, 30))
    machine.check({"input_ids": ids, "attention_mask": np.ones_like(ids)}, session(input_ids=ids))
    assert max(batch for batch, _ in machine.trt.shapes_run) == 8


def test_padding_to_the_steps_of_an_engine_is_counted(machine: Machine) -> None:
    session = machine.session()
    session.infer(encodings([17, 20, 33]), batch_tokens=40)
    computed = sum(batch * tokens for batch, tokens in machine.trt.shapes_run)
    assert computed > 2 * 20 + 33, "no batch was padded beyond its longest row"
    assert session.padding == PaddingCount(tokens=70, padded_tokens=computed - 70)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_where_padding_changes_answers_texts_answer_as_they_do_alone(graphs: str, new_machine: MachineMaker) -> None:
    machine = new_machine(profiles=PROFILES, padding=BIGBIRD)
    session = machine.session(graphs=graphs)
    given = encodings([*range(1, 201, 3), *range(195, 201), *range(36, 45)])
    check(machine, given, session.infer(given))
    computed = sum(batch * tokens for batch, tokens in machine.trt.shapes_run)
    # Graphs are checked by running a batch again.
    assert graphs == "on" or session.padding.tokens + session.padding.padded_tokens == computed
    assert max(batch for batch, _ in machine.trt.shapes_run) == 8, "texts do share batches"


def test_where_padding_changes_answers_a_batch_is_answered_as_given(new_machine: MachineMaker) -> None:
    for padding in ["right", "left", "holes", "all"]:
        with named_case(padding):
            machine = new_machine(profiles=PROFILES, padding=BIGBIRD)
            session = machine.session()
            for tokens in (20, 32, 33, 40, 41, 60, 61, 181, 200):
                # Five rows of more than 32 tokens run in parts, which are no narrower.
                batch = new_batch(5, tokens, padding)
                machine.check(batch, session(**batch))
                assert session.max_rows(tokens) == (8 if tokens <= 32 else 4)


def test_an_engine_that_pads_too_far_is_refused(new_machine: MachineMaker) -> None:
    machine = new_machine(profiles=(ProfileShape(batch=(1, 1, 8), tokens=(64, 128, 200)),), padding=BIGBIRD)
    with pytest.raises(BackendUnavailableError, match=r"(?s)40 tokens only with .* bigbird_last_block='row'"):
        machine.runner()
