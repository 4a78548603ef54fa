"""Values beyond an input's bound are refused before any backend runs, in the same words whichever way they come."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputError
from hdruntime.jobs.rows import Columns
from hdruntime.session import Session
from hdruntime.text.encoding import Encoding
from support.backend_sessions import BACKENDS, session_in
from support.comparators import named_case
from support.job_runs import read, run
from support.needs import needs_openvino
from support.recurrent_bundle import make_streaming_bundle
from support.tiny_bundle import INPUTS
from tests.runtime.backends.tensorrt.conftest import new_machine  # noqa: F401 fixture

IDS = [[4, 5, 6]]
TYPES = "the model has 2 token types, 0 to 1."
VOCABULARY = "the vocabulary has 11 ids, 0 to 10."
REFUSED: dict[str, dict[str, Any]] = {
    f"input_ids[0, 2] is 11; {VOCABULARY}": {"input_ids": [[4, 5, 11]]},
    f"input_ids[0, 1] is -1; {VOCABULARY}": {"input_ids": [[4, -1, 5]]},
    f"token_type_ids[0, 1] is 2; {TYPES}": {"token_type_ids": [[0, 2, 3]]},
    f"token_type_ids[0, 0] is -1; {TYPES}": {"token_type_ids": [[-1, 0, 0]]},
    f"token_type_ids[0, 2] is {2**32}; {TYPES}": {"token_type_ids": [[0, 0, 2**32]]},
    "attention_mask[0, 2] is 2; it must be 1 for real tokens and 0 for padding.": {"attention_mask": [[1, 1, 2]]},
    "attention_mask[0, 0] is -1; it must be 1 for real tokens and 0 for padding.": {"attention_mask": [[-1, 1, 1]]},
}
"""The first line of what is said -> inputs."""


def session_of(backend: str, request: pytest.FixtureRequest) -> Session:
    if backend == "tensorrt":
        return request.getfixturevalue("new_machine")(token_types=True).session()  # type: ignore[no-any-return]
    bundle = open_bundle(request.getfixturevalue("new_bundle")(token_types=True))
    return session_in(backend, bundle, request)


@pytest.fixture(params=[*BACKENDS, "tensorrt"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Of each backend; those for a GPU are simulated."""
    with session_of(request.param, request) as opened:
        yield opened


def test_every_backend_refuses_what_exceeds_a_bound_in_the_same_words(session: Session) -> None:
    most = session(input_ids=[[4, 5, 10]], token_type_ids=[[0, 1, 1]], attention_mask=[[1, 1, 0]])
    assert np.isfinite(most["last_hidden_state"]).all()
    for said, inputs in REFUSED.items():
        with named_case(said):
            with pytest.raises(InputError) as refused:
                session(**({"input_ids": IDS} | inputs))
            assert str(refused.value).partition("\n")[0] == said
    # As made by a caller; tokens before and behind the wrong one are right.
    for said, inputs in REFUSED.items():
        ids, types = inputs.get("input_ids", IDS)[0], inputs.get("token_type_ids", [[0] * 3])[0]
        if "attention_mask" not in inputs:
            with named_case("text", said), pytest.raises(InputError) as refused:
                session.infer([Encoding(ids, types, [(0, 0)] * 3, [0] * 3)])
            assert str(refused.value).partition("\n")[0] == said


@pytest.mark.parametrize("session", ["onnxruntime"], indirect=True)
def test_integers_that_no_array_holds_are_refused_too(session: Session) -> None:
    for ids, types, said in (
        ([2**63], [0], "input_ids holds 9223372036854775808, which is more than int64 can hold"),
        ([4, 2**65], [0, 0], "input_ids holds values that are not integers of at most 64 bits"),
        ([4, 5], [0, 2**65], "token_type_ids holds values that are not integers of at most 64 bits"),
    ):
        with named_case(said), pytest.raises(InputError, match=said):
            session.infer([Encoding(ids, types, [(0, 0)] * len(ids), [0] * len(ids))])


def with_types_bounded(manifest: Manifest, bound: int | None) -> Manifest:
    types = dataclasses.replace(INPUTS[2], bound=bound)
    others = (spec for spec in manifest.inputs if spec.role is not Role.TOKEN_TYPES)
    return dataclasses.replace(manifest, inputs=(*others, types))


def test_a_bundle_that_does_not_say_how_many_types_there_are_is_read(new_bundle: Callable[..., Path]) -> None:
    bundle = open_bundle(new_bundle(token_types=True))
    old = dataclasses.replace(bundle, manifest=with_types_bounded(bundle.manifest, None))
    with Session(old, OnnxRuntimeRunner(old)) as session:
        session(input_ids=IDS, token_type_ids=[[0, 1, 1]])
        with pytest.raises(InputError, match=r"token_type_ids\[0, 1\] is -1; it must be 0 or more\."):
            session(input_ids=IDS, token_type_ids=[[0, -1, 1]])


def test_a_stream_refuses_what_exceeds_a_bound(tmp_path: Path) -> None:
    bundle = open_bundle(make_streaming_bundle(tmp_path / "bundle"))
    typed = Bundle(bundle.path, with_types_bounded(bundle.manifest, 2))
    with Session(typed, OnnxRuntimeRunner(bundle)) as session:
        document = Encoding([4, 5, 6], [0, 1, 2], [(0, 0)] * 3, [0] * 3)
        said = r"token_type_ids\[0, 2\] is 2; the model has 2 token types, 0 to 1\."
        with pytest.raises(InputError, match=f"^{said}"):
            session.stream(document)
        with pytest.raises(InputError, match=f"^Document 0: {said}"):
            next(session.stream_all([document]))
        with pytest.raises(InputError, match=r"^input_ids\[0, 1\] is 11; the vocabulary has"):
            session.stream([4, 11])
        with pytest.raises(InputError, match=f"^input_ids holds {2**63}, which is more than int64"):
            session.stream(np.array([2**63], np.uint64))


def test_a_tokenizers_type_beyond_the_models_is_its_texts_error_and_no_other(
    new_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """Jobs, encoders, the server and Triton's model check each text before it is in a batch."""
    path = new_bundle(task="text-classification", token_types=True)
    manifest, told = open_bundle(path).manifest, json.loads((path / "tokenizer.json").read_text())
    for chunk in told["post_processor"]["pair"]:
        if chunk.get("Sequence", {}).get("id") == "B":
            chunk["Sequence"]["type_id"] = 2
    (path / "tokenizer.json").write_text(json.dumps(told))
    seal(path, manifest)
    with hdruntime.load(path, "onnxruntime", max_seq_length="bundle") as session:
        bad, good = session.tokenize(["long", "whole"], ["read", ""])
    assert (bad.token_type_ids, good.token_type_ids) == ([0, 0, 0, 2, 1], [0, 0, 0, 1])
    rows = [{"text": "long", "pair": "read"}, {"text": "whole", "pair": ""}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns(text_pair="pair")
    run(path, tmp_path / "in.jsonl", tmp_path / "out.jsonl", columns=columns, max_seq_length="bundle")
    refused, answered = read(tmp_path / "out.jsonl")
    assert str(refused["error"]).partition("\n")[0] == f"token_type_ids[0, 3] is 2; {TYPES}"
    assert answered["error"] is None


@needs_openvino
def test_bundles_of_a_build_have_their_bounds_in_each_backend(openvino_bundles: Callable[..., Any]) -> None:
    bundle = openvino_bundles("bert")
    types = bundle.manifest.input_of(Role.TOKEN_TYPES)
    assert (types.bound, bundle.manifest.number_of_values(types)) == (2, 2)
    said = set()
    for backend in ("onnxruntime", "openvino"):
        with hdruntime.load(bundle.path, backend, threads=1) as session:
            for wrong in ({"token_type_ids": [[0, 2, 0]]}, {"input_ids": [[4, 120, 5]]}, {"input_ids": [[4, -1, 5]]}):
                with pytest.raises(InputError) as refused:
                    session(**({"input_ids": IDS} | wrong))
                said.add(str(refused.value))
    assert len(said) == 3
