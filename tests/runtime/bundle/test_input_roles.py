"""What a manifest says of its inputs agrees with itself: roles, defaults, bounds, types and shapes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, Role, TensorSpec
from hdruntime.bundle.manifest_json import json_from_manifest, manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError
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


@pytest.mark.parametrize(
    "more",
    [
        (),
        (TYPES,),
        (dataclasses.replace(TYPES, default=AFTER),),
        *((dataclasses.replace(MARKS, default=default),) for default in (REQUIRED, ZEROS, FIRST_TOKEN, UNTIL)),
        (dataclasses.replace(MARKS, bound=None),),
        (dataclasses.replace(MARKS, name="global_attention_mask"), TYPES),
    ],
)
def test_inputs_that_agree_are_read_as_written(manifest: Manifest, more: tuple[InputSpec, ...]) -> None:
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


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), r"inputs has 0 of the role ids, and there is one"),
        ((MASK,), r"inputs has 0 of the role ids, and there is one"),
        ((IDS,), r"inputs has 0 of the role mask, and there is one"),
        ((IDS, MASK, dataclasses.replace(IDS, name="b")), r"inputs has 2 of the role ids, and there is one"),
        ((IDS, MASK, dataclasses.replace(MASK, name="b")), r"inputs has 2 of the role mask, and there is one"),
        (
            (IDS, MASK, TYPES, dataclasses.replace(TYPES, name="b")),
            r"inputs has 2 of the role token_types; one at most",
        ),
        ((IDS, MASK, MARKS, dataclasses.replace(MARKS, name="b")), r"inputs has 2 of the role marks; one at most"),
        ((IDS, MASK, dataclasses.replace(MARKS, name="input_ids")), r"inputs has 2 of input_ids"),
    ],
)
def test_a_role_that_is_missing_or_there_twice_is_named(
    manifest: Manifest, inputs: tuple[InputSpec, ...], message: str
) -> None:
    with pytest.raises(BundleCorruptError, match=rf"^manifest\.{message}\.\nRebuild or copy"):
        read(manifest, *inputs)


ALL = [REQUIRED, ZEROS, ONES, FIRST_TOKEN, UNTIL, AFTER]
RIGHT = {
    IDS: ([REQUIRED], "required"),
    MASK: ([ONES], "ones"),
    TYPES: ([ZEROS, AFTER], "zeros or after_token"),
    MARKS: ([REQUIRED, ZEROS, FIRST_TOKEN, UNTIL], "required or zeros or first_token or until_token"),
    MEMORY: ([ZEROS], "zeros"),
}


def with_one(spec: InputSpec, changed: InputSpec) -> list[InputSpec]:
    """The inputs of every model and one more, or one in the place of its like; the changed one is the last."""
    return [*(other for other in (IDS, MASK) if other.role is not spec.role), changed]


@pytest.mark.parametrize(
    ("spec", "default"),
    [(spec, default) for spec, (right, _) in RIGHT.items() for default in ALL if default not in right],
    ids=lambda value: value.role.value if isinstance(value, InputSpec) else value.fill.value,
)
def test_a_default_that_a_role_has_not_is_refused(manifest: Manifest, spec: InputSpec, default: Default) -> None:
    inputs = with_one(spec, dataclasses.replace(spec, default=default))
    where = rf"inputs\[{len(inputs) - 1}\]\.default\.fill"
    wanted = rf"{RIGHT[spec][1]} for {spec.role.value}, not {default.fill.value}"
    with pytest.raises(BundleCorruptError, match=rf"^manifest\.{where} should be {wanted}\.\n"):
        read(manifest, *inputs, outputs=(FED,) if spec is MEMORY else ())


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
def test_a_token_that_a_rule_needs_or_needs_not_is_named(
    manifest: Manifest, spec: InputSpec, default: Default, message: str
) -> None:
    inputs = with_one(spec, dataclasses.replace(spec, default=default))
    with pytest.raises(BundleCorruptError, match=rf"inputs\[{len(inputs) - 1}\]\.default\.token_id {message}\.\n"):
        read(manifest, *inputs)


@pytest.mark.parametrize("spec", [IDS, MASK, TYPES, MEMORY], ids=lambda spec: spec.role.value)
def test_only_marks_have_a_bound(manifest: Manifest, spec: InputSpec) -> None:
    inputs = with_one(spec, dataclasses.replace(spec, bound=5))
    with pytest.raises(BundleCorruptError, match=rf"inputs\[{len(inputs) - 1}\]\.bound is 5, and only marks have one"):
        read(manifest, *inputs, outputs=(FED,) if spec is MEMORY else ())


@pytest.mark.parametrize("spec", [IDS, MASK, TYPES, MARKS], ids=lambda spec: spec.role.value)
@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"dtype": "float32"}, r"float32 \[batch, tokens\]"),
        ({"shape": ("batch",)}, r"int64 \[batch\]"),
        ({"shape": ("tokens", "batch")}, r"int64 \[tokens, batch\]"),
        ({"shape": ("batch", 16)}, r"int64 \[batch, 16\]"),
        ({"shape": ("batch", "tokens", 1)}, r"int64 \[batch, tokens, 1\]"),
    ],
)
def test_what_is_about_tokens_is_int64_batch_by_tokens(
    manifest: Manifest, spec: InputSpec, changed: dict, found: str
) -> None:
    inputs = with_one(spec, dataclasses.replace(spec, **changed))
    where = rf"inputs\[{len(inputs) - 1}\]"
    with pytest.raises(BundleCorruptError, match=rf"{where} should be int64 \[batch, tokens\], not {found}\.\n"):
        read(manifest, *inputs)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"dtype": "int64"}, r"int64 \[batch, 1, 4, 4\]"),
        ({"shape": ("batch", "tokens", 4)}, r"float32 \[batch, tokens, 4\]"),
        ({"shape": ("batch", "slots")}, r"float32 \[batch, slots\]"),
        ({"shape": (1, 4, 4)}, r"float32 \[1, 4, 4\]"),
        ({"shape": ()}, r"float32 \[\]"),
    ],
)
def test_a_memory_is_float32_of_sizes(manifest: Manifest, changed: dict, found: str) -> None:
    spec = dataclasses.replace(MEMORY, **changed)
    message = rf"inputs\[2\] should be float32 \[batch, \.\.\.\] with sizes, not {found}\.\n"
    with pytest.raises(BundleCorruptError, match=message):
        read(manifest, IDS, MASK, spec, outputs=(FED,))


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        ((), "there is none"),
        ((dataclasses.replace(FED, name="memory"),), "there is none"),
        ((dataclasses.replace(FED, shape=("batch", 4, 1, 4)),), r"that is float32 \[batch, 4, 1, 4\]"),
    ],
    ids=["none", "of another name", "of another shape"],
)
def test_a_memory_without_its_output_is_refused(
    manifest: Manifest, outputs: tuple[TensorSpec, ...], found: str
) -> None:
    message = rf"inputs\[2\] is float32 \[batch, 1, 4, 4\] of the output left, and {found}\.\n"
    with pytest.raises(BundleCorruptError, match=message):
        read(manifest, IDS, MASK, MEMORY, outputs=outputs)


def test_a_memory_names_its_output(manifest: Manifest) -> None:
    unnamed = dataclasses.replace(MEMORY, fed_from=None)
    with pytest.raises(
        BundleCorruptError, match=r"inputs\[2\]\.fed_from is None, and a memory has the name of an output"
    ):
        read(manifest, IDS, MASK, unnamed, outputs=(FED,))


@pytest.mark.parametrize("spec", [IDS, MASK, TYPES, MARKS], ids=lambda spec: spec.role.value)
def test_only_a_memory_is_fed_from_an_output(manifest: Manifest, spec: InputSpec) -> None:
    inputs = with_one(spec, dataclasses.replace(spec, fed_from="last_hidden_state"))
    message = rf"inputs\[{len(inputs) - 1}\]\.fed_from is last_hidden_state, and only memories have one"
    with pytest.raises(BundleCorruptError, match=message):
        read(manifest, *inputs)
