"""What a manifest says of its inputs agrees with itself: roles, defaults, bounds, types and shapes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, Role, TensorSpec
from hdruntime.bundle.manifest_json import json_of_manifest, manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError
from support.comparators import named_case
from support.tiny_bundle import INPUTS

IDS, MASK, TYPES = INPUTS
REQUIRED, ZEROS, ONES = (Default(fill=fill) for fill in (Fill.REQUIRED, Fill.ZEROS, Fill.ONES))
FIRST_TOKEN = Default(fill=Fill.FIRST_TOKEN)
UNTIL, AFTER = (Default(fill=fill, token_id=3) for fill in (Fill.UNTIL_TOKEN, Fill.AFTER_TOKEN))
MARKS = InputSpec(
    name="marks",
    dtype="int64",
    shape=("batch", "tokens"),
    role=Role.GLOBAL_ATTENTION_MASK,
    default=FIRST_TOKEN,
    bound=4,
)
MEMORY = InputSpec(
    name="memory", dtype="float32", shape=("batch", 1, 4, 4), role=Role.RECURRENT_STATE, default=ZEROS, fed_from="left"
)
FED = TensorSpec(name="left", dtype="float32", shape=("batch", 1, 4, 4))


@pytest.fixture
def manifest(bundle_path: Path) -> Manifest:
    return open_bundle(bundle_path).manifest


def read(manifest: Manifest, *inputs: InputSpec, outputs: tuple[TensorSpec, ...] = ()) -> Manifest:
    """What is read of a manifest with other inputs, and more outputs, as it was written."""
    changed = dataclasses.replace(manifest, inputs=inputs, outputs=(*manifest.outputs, *outputs))
    found = manifest_from_json(json_of_manifest(changed))
    assert found == changed
    return found


AGREEING = [
    (),
    (dataclasses.replace(TYPES, default=AFTER),),
    (dataclasses.replace(TYPES, bound=None),),  # as bundles that were built before it was kept have it
    *((dataclasses.replace(MARKS, default=default),) for default in (REQUIRED, ZEROS, FIRST_TOKEN, UNTIL)),
    (dataclasses.replace(MARKS, bound=None), TYPES),
]


def test_inputs_that_agree_are_read_as_written(manifest: Manifest) -> None:
    for more in AGREEING:
        with named_case(more):
            found = read(manifest, IDS, MASK, *more)
            assert (found.ids, found.mask) == ("input_ids", "attention_mask")


def test_inputs_are_known_by_their_roles_not_their_names_or_places(manifest: Manifest) -> None:
    names = {spec: dataclasses.replace(spec, name=f"my {spec.role.value}") for spec in INPUTS}
    found = read(manifest, names[TYPES], names[MASK], names[IDS])
    assert (found.ids, found.mask) == ("my ids", "my mask")
    assert found.input_of(Role.TOKEN_TYPES) == names[TYPES]
    assert found.input_of(Role.GLOBAL_ATTENTION_MASK) is None


def test_there_may_be_several_recurrent_states(manifest: Manifest) -> None:
    state = dataclasses.replace(MEMORY, name="state", shape=("batch", 7), fed_from="left of the state")
    left = dataclasses.replace(FED, name="left of the state", shape=("batch", 7))
    found = read(manifest, IDS, MASK, MEMORY, state, outputs=(left, FED))
    assert found.input_of(Role.RECURRENT_STATE) == MEMORY


def test_only_a_model_that_remembers_has_documents_of_several_calls(manifest: Manifest) -> None:
    limited = dataclasses.replace(manifest, document_tokens=16)
    assert read(limited, IDS, MASK, MEMORY, outputs=(FED,)).document_tokens == 16
    with pytest.raises(
        BundleCorruptError, match=r"manifest\.document_tokens is 16, but no input has the role recurrent_state"
    ):
        read(limited, IDS, MASK)


def with_one(spec: InputSpec, **changes: Any) -> list[InputSpec]:
    """The inputs of every model and one more, or one in the place of its like; the changed one is the last."""
    return [*(other for other in (IDS, MASK) if other.role is not spec.role), dataclasses.replace(spec, **changes)]


SIZES = r" should be float32 \[batch, \.\.\.\] or \[batch, memory, \.\.\.\] with sizes, not "
OF_TOKENS = r" should be int64 \[batch, tokens\], not "
CONTRADICTIONS = [
    ([MASK], r"inputs has 0 of the role ids; exactly one is needed"),
    ([IDS, MASK, TYPES, dataclasses.replace(TYPES, name="b")], "inputs has 2 of the role token_types; at most one is"),
    ([IDS, MASK, dataclasses.replace(MARKS, name="input_ids")], "inputs has 2 of input_ids"),
    (with_one(MASK, default=ZEROS), r"{last}\.default\.fill should be ones for mask, not zeros"),
    (with_one(TYPES, default=UNTIL), r"{last}\.default\.fill should be zeros or after_token for token_types, not"),
    (
        with_one(MEMORY, default=REQUIRED),
        r"{last}\.default\.fill should be zeros or ones for recurrent_state, not required",
    ),
    (with_one(TYPES, default=Default(fill=Fill.AFTER_TOKEN)), r"{last}\.default\.token_id is None for the fill after_"),
    (
        with_one(IDS, default=Default(fill=Fill.REQUIRED, token_id=3)),
        r"{last}\.default\.token_id is 3 for the fill req",
    ),
    (with_one(IDS, bound=5), r"{last}\.bound is 5; only token types, global_attention_mask, memory caches and states"),
    (with_one(MEMORY, bound=4), r"{last}\.bound is 4; only token types"),
    (
        with_one(TYPES, fed_from="last_hidden_state"),
        r"{last}\.fed_from is last_hidden_state; only recurrent states are fed",
    ),
    (with_one(TYPES, dtype="float32"), "{last}" + OF_TOKENS + r"float32 \[batch, tokens\]"),
    (with_one(MARKS, shape=("tokens", "batch")), "{last}" + OF_TOKENS + r"int64 \[tokens, batch\]"),
    (with_one(MEMORY, dtype="int64"), "{last}" + SIZES + r"int64 \[batch, 1, 4, 4\]"),
    (with_one(MEMORY, shape=("batch", "slots")), "{last}" + SIZES + r"float32 \[batch, slots\]"),
    (with_one(MEMORY, shape=("batch", "memory", 4)), r"{last}\.bound is None; a memory cache needs its maximum size"),
    (with_one(MEMORY, fed_from=None), r"{last}\.fed_from is None; a recurrent state needs the name of an output"),
    (with_one(MEMORY, fed_from="right"), r"{last} is float32 .*, fed from the output right, but there is none"),
    (
        with_one(MEMORY, shape=("batch", 4, 1, 4)),
        r"{last} is .*, fed from the output left, but that is float32 \[batch, 1",
    ),
]
"""Inputs, and what is said of the first contradiction; `{last}` is the last input, as its key."""


def test_a_contradiction_is_named_with_its_place(manifest: Manifest) -> None:
    for inputs, said in CONTRADICTIONS:
        message = said.replace("{last}", rf"inputs\[{len(inputs) - 1}\]")
        with named_case(said), pytest.raises(BundleCorruptError, match=rf"^manifest\.{message}.*\.\nRebuild or copy"):
            read(manifest, *inputs, outputs=(FED,))
