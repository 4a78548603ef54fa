"""What a manifest says of its inputs agrees with itself: roles, defaults, bounds, types and shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, Role, TensorSpec
from hdruntime.bundle.manifest_json import json_from_manifest, manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError
from support.comparators import named_case
from support.tiny_bundle import INPUTS

IDS, MASK, TYPES = INPUTS
REQUIRED, ZEROS, ONES = (Default(fill=fill) for fill in (Fill.REQUIRED, Fill.ZEROS, Fill.ONES))
FIRST_TOKEN = Default(fill=Fill.FIRST_TOKEN)
UNTIL, AFTER = (Default(fill=fill, token_id=3) for fill in (Fill.UNTIL_TOKEN, Fill.AFTER_TOKEN))
MARKS = InputSpec(name="marks", dtype="int64", shape=("batch", "tokens"), role=Role.MARKS, default=FIRST_TOKEN, bound=4)
MEMORY = InputSpec(
    name="memory", dtype="float32", shape=("batch", 1, 4, 4), role=Role.MEMORY, default=ZEROS, fed_from="left"
)
FED = TensorSpec(name="left", dtype="float32", shape=("batch", 1, 4, 4))


@pytest.fixture
def manifest(bundle_path: Path) -> Manifest:
    return open_bundle(bundle_path).manifest


def read(manifest: Manifest, *inputs: InputSpec, outputs: tuple[TensorSpec, ...] = ()) -> Manifest:
    """What is read of a manifest with other inputs, and more outputs, as it was written."""
    changed = dataclasses.replace(manifest, inputs=inputs, outputs=(*manifest.outputs, *outputs))
    found = manifest_from_json(json_from_manifest(changed))
    assert found == changed
    return found


AGREEING = [
    (),
    (TYPES,),
    (dataclasses.replace(TYPES, default=AFTER),),
    *((dataclasses.replace(MARKS, default=default),) for default in (REQUIRED, ZEROS, FIRST_TOKEN, UNTIL)),
    (dataclasses.replace(MARKS, bound=None),),
    (dataclasses.replace(MARKS, name="global_attention_mask"), TYPES),
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
    assert found.input_of(Role.MARKS) is None


def test_there_may_be_several_memories(manifest: Manifest) -> None:
    state = dataclasses.replace(MEMORY, name="state", shape=("batch", 7), fed_from="left of the state")
    left = dataclasses.replace(FED, name="left of the state", shape=("batch", 7))
    found = read(manifest, IDS, MASK, MEMORY, state, outputs=(left, FED))
    assert found.input_of(Role.MEMORY) == MEMORY


def test_only_a_model_that_remembers_has_documents_of_several_calls(manifest: Manifest) -> None:
    limited = dataclasses.replace(manifest, document_tokens=16)
    assert read(limited, IDS, MASK, MEMORY, outputs=(FED,)).document_tokens == 16
    with pytest.raises(BundleCorruptError, match=r"manifest\.document_tokens is 16, but no input has the role memory"):
        read(limited, IDS, MASK)


def with_one(spec: InputSpec, **changes: object) -> list[InputSpec]:
    """The inputs of every model and one more, or one in the place of its like; the changed one is the last."""
    return [*(other for other in (IDS, MASK) if other.role is not spec.role), dataclasses.replace(spec, **changes)]


def refused(manifest: Manifest, inputs: Sequence[InputSpec], message: str, *outputs: TensorSpec) -> None:
    """Reading a manifest with these inputs fails; `{last}` in the message is the last one, as its key."""
    message = message.replace("{last}", rf"inputs\[{len(inputs) - 1}\]")
    with pytest.raises(BundleCorruptError, match=rf"^manifest\.{message}(, .*)?\.\nRebuild or copy"):
        read(manifest, *inputs, outputs=outputs)


WRONG_ROLES = [
    ((), "inputs has 0 of the role ids; exactly one is needed"),
    ((MASK,), "inputs has 0 of the role ids; exactly one is needed"),
    ((IDS,), "inputs has 0 of the role mask; exactly one is needed"),
    *(
        ((IDS, MASK, other, dataclasses.replace(spec, name="b")), f"inputs has 2 of the role {message}")
        for spec, other, message in (
            (IDS, TYPES, "ids; exactly one is needed"),
            (MASK, TYPES, "mask; exactly one is needed"),
            (TYPES, TYPES, "token_types; at most one is allowed"),
            (MARKS, MARKS, "marks; at most one is allowed"),
        )
    ),
    ((IDS, MASK, dataclasses.replace(MARKS, name="input_ids")), "inputs has 2 of input_ids"),
]


def test_a_role_that_is_missing_or_there_twice_is_named(manifest: Manifest) -> None:
    for inputs, message in WRONG_ROLES:
        with named_case(message):
            refused(manifest, inputs, message)


ALL = [REQUIRED, ZEROS, ONES, FIRST_TOKEN, UNTIL, AFTER]
RIGHT = {
    IDS: ([REQUIRED], "required"),
    MASK: ([ONES], "ones"),
    TYPES: ([ZEROS, AFTER], "zeros or after_token"),
    MARKS: ([REQUIRED, ZEROS, FIRST_TOKEN, UNTIL], "required or zeros or first_token or until_token"),
    MEMORY: ([ZEROS, ONES], "zeros or ones"),
}


DEFAULTS_OF_OTHER_ROLES = [
    (spec, default) for spec, (right, _) in RIGHT.items() for default in ALL if default not in right
]


def test_a_default_of_another_role_is_refused(manifest: Manifest) -> None:
    for spec, default in DEFAULTS_OF_OTHER_ROLES:
        with named_case(spec.role, default.fill):
            message = (
                rf"{{last}}\.default\.fill should be {RIGHT[spec][1]} for {spec.role.value}, not {default.fill.value}"
            )
            refused(manifest, with_one(spec, default=default), message, FED)


@pytest.mark.parametrize(
    ("spec", "default", "message"),
    [
        (TYPES, Default(fill=Fill.AFTER_TOKEN), "is None for the fill after_token"),
        (MARKS, Default(fill=Fill.UNTIL_TOKEN), "is None for the fill until_token"),
        (TYPES, Default(fill=Fill.ZEROS, token_id=3), "is 3 for the fill zeros"),
        (MARKS, Default(fill=Fill.FIRST_TOKEN, token_id=0), "is 0 for the fill first_token"),
        (IDS, Default(fill=Fill.REQUIRED, token_id=3), "is 3 for the fill required"),
    ],
)
def test_a_token_that_contradicts_its_rule_is_named(
    manifest: Manifest, spec: InputSpec, default: Default, message: str
) -> None:
    refused(manifest, with_one(spec, default=default), rf"{{last}}\.default\.token_id {message}")


OF_ONE_ROLE = [
    (
        Role.MARKS,
        {"bound": 5},
        r"\.bound is 5; only marks, memories of tokens, and memories that count them have a bound",
    ),
    (
        Role.MEMORY,
        {"fed_from": "last_hidden_state"},
        r"\.fed_from is last_hidden_state; only memories are fed from an output",
    ),
    *(
        (Role.MEMORY, changes, rf" should be int64 \[batch, tokens\], not {found}")
        for changes, found in (
            ({"dtype": "float32"}, r"float32 \[batch, tokens\]"),
            ({"shape": ("batch",)}, r"int64 \[batch\]"),
            ({"shape": ("tokens", "batch")}, r"int64 \[tokens, batch\]"),
            ({"shape": ("batch", 16)}, r"int64 \[batch, 16\]"),
            ({"shape": ("batch", "tokens", 1)}, r"int64 \[batch, tokens, 1\]"),
        )
    ),
]
"""Role, what only inputs of that role may be, what is said of others."""


OF_OTHER_ROLES = [
    (spec, changes, message)
    for spec in (IDS, MASK, TYPES, MARKS, MEMORY)
    for role, changes, message in OF_ONE_ROLE
    if spec.role is not role
]


def test_what_only_one_role_has_is_refused_in_others(manifest: Manifest) -> None:
    for spec, changes, message in OF_OTHER_ROLES:
        with named_case(spec.role, message):
            refused(manifest, with_one(spec, **changes), "{last}" + message, FED)


WRONG_MEMORIES = [
    *(
        (
            changes,
            rf"{{last}} should be float32 \[batch, \.\.\.\] or \[batch, memory, \.\.\.\] with sizes, not {found}",
        )
        for changes, found in (
            ({"dtype": "int64"}, r"int64 \[batch, 1, 4, 4\]"),
            ({"shape": ("batch", "tokens", 4)}, r"float32 \[batch, tokens, 4\]"),
            ({"shape": ("batch", "slots")}, r"float32 \[batch, slots\]"),
            ({"shape": (1, 4, 4)}, r"float32 \[1, 4, 4\]"),
            ({"shape": ()}, r"float32 \[\]"),
        )
    ),
    (
        {"shape": ("batch", "memory", 4)},
        r"{last}\.bound is None; a memory of tokens needs the most that it may have",
    ),
    (
        {"bound": 4},
        r"{last}\.bound is 4; only marks, memories of tokens, and memories that count them have a bound",
    ),
    ({"fed_from": None}, r"{last}\.fed_from is None; a memory needs the name of an output"),
    ({"fed_from": "right"}, r"{last} is float32 \[batch, 1, 4, 4\], fed from the output right, but there is none"),
    (
        {"shape": ("batch", 4, 1, 4)},
        r"{last} is float32 \[batch, 4, 1, 4\], fed from the output left, but that is float32 \[batch, 1, 4, 4\]",
    ),
]


def test_a_memory_is_float32_of_sizes_and_an_output_of_its_shape(manifest: Manifest) -> None:
    for changes, message in WRONG_MEMORIES:
        with named_case(message):
            refused(manifest, [IDS, MASK, dataclasses.replace(MEMORY, **changes)], message, FED)
