"""``manifest.json`` is read with every value checked, by itself and against the others."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hdruntime.bundle.checked_json import (
    JsonMismatchError,
    MalformedJsonError,
    UnknownChoiceError,
    from_values,
    json_from_dataclass,
    values_of_json,
)
from hdruntime.bundle.manifest import EngineFile, Fill, InputSpec, Manifest, Positions, Role, TensorSpec
from hdruntime.bundle.sentence_settings import PairTemplate, Slot, TextTemplate
from hdruntime.bundle.task_formats import format_of
from hdruntime.constants import FORMAT_VERSION
from hdruntime.errors import BundleCorruptError, BundleVersionError

_ONE_OF_ROLE = (Role.IDS, Role.MASK)
"""Every bundle has one input of each of these."""

_FILLS_OF_ROLE = {
    Role.IDS: (Fill.REQUIRED,),
    Role.MASK: (Fill.ONES,),
    Role.TOKEN_TYPES: (Fill.ZEROS, Fill.AFTER_TOKEN),
    Role.GLOBAL_ATTENTION_MASK: (Fill.REQUIRED, Fill.ZEROS, Fill.FIRST_TOKEN, Fill.UNTIL_TOKEN),
    Role.POOLED: (Fill.ONES,),
    Role.ATTENDED: (Fill.ONES,),
    Role.RECURRENT_STATE: (Fill.ZEROS, Fill.ONES),
}

_FILLS_BY_TOKEN = (Fill.UNTIL_TOKEN, Fill.AFTER_TOKEN)


def manifest_from_json(text: str | bytes) -> Manifest:
    """Read the text of ``manifest.json``.

    A BundleCorruptError names the key that is missing, unknown, of another type, out of its range, or that contradicts
    another, or says that the text has changed since it was written; a text of another format is a BundleVersionError.
    """
    try:
        values = values_of_json(text)
        # The version comes first: a newer format may have other keys.
        version = from_values(values, _AnyFormat, name="manifest").format_version
        if version > FORMAT_VERSION:
            raise BundleVersionError(
                f"The bundle has format version {version}; this hdexport reads {FORMAT_VERSION}.",
                hint="Update it with: pip install -U hdexport",
            )
        if version < FORMAT_VERSION:
            raise BundleVersionError(
                f"The bundle has format version {version}, of a development version of hdexport; "
                f"this hdexport reads {FORMAT_VERSION}.",
                hint="Build it again from its checkpoint: hdexport build --help",
            )
        manifest = from_values(_checked_values(values), Manifest, name="manifest", known_keys_only=True)
        for problem in _problems(manifest):
            raise JsonMismatchError(f"manifest.{problem}")
    except MalformedJsonError as error:
        raise BundleCorruptError(f"The manifest is not valid JSON: {error}.", hint=_COPY_AGAIN) from None
    except UnknownChoiceError as error:
        # A later version may have added the choice without a new format.
        raise BundleCorruptError(f"{error}.", hint=f"{_COPY_AGAIN}\n{_IF_NEWER}") from None
    except JsonMismatchError as error:
        raise BundleCorruptError(f"{error}.", hint=_COPY_AGAIN) from None
    return manifest


def json_of_manifest(manifest: Manifest) -> str:
    """The text of ``manifest.json``, with its checksum."""
    return with_checksum(json_from_dataclass(manifest))


def with_checksum(text: str | bytes) -> str:
    """The text of a ``manifest.json`` that was edited, with the checksum of its values; another text is a
    BundleCorruptError."""
    try:
        values = values_of_json(text)
    except MalformedJsonError as error:
        raise BundleCorruptError(f"The manifest is not valid JSON: {error}.", hint=_COPY_AGAIN) from None
    if not isinstance(values, dict):
        raise BundleCorruptError(f"The manifest should be an object, not {values!r:.60}.", hint=_COPY_AGAIN)
    values = {**values, CHECKSUM_KEY: checksum_of(values)}
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def checksum_of(values: Mapping[str, object]) -> str:
    """The SHA-256 of a manifest's canonical form: JSON in ASCII with sorted keys, without spaces and the checksum."""
    rest = {key: value for key, value in values.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _checked_values(values: object) -> dict[str, object]:
    """The values without the checksum, which is checked."""
    assert isinstance(values, dict), "it has a format version"
    written, found = values.get(CHECKSUM_KEY), checksum_of(values)
    if written != found:
        raise JsonMismatchError(
            f"manifest.{CHECKSUM_KEY} is {json.dumps(written):.80}, and its content has {found}: it has changed since "
            "it was written, or was edited by hand (hdexport inspect BUNDLE --fix-checksum)"
        )
    return {key: value for key, value in values.items() if key != CHECKSUM_KEY}


CHECKSUM_KEY = "manifest_sha256"
"""Key of ``manifest.json`` with the result of `checksum_of`."""

_COPY_AGAIN = "Rebuild or copy the bundle again."

_IF_NEWER = "If a newer hdexport built it: pip install -U hdexport"


@dataclass(frozen=True, kw_only=True)
class _AnyFormat:
    """The fields of a manifest of any format."""

    format_version: int


def _problems(manifest: Manifest) -> Iterator[str]:
    """Contradictions within a manifest, or to its task; each begins with a key."""
    yield from _input_problems(manifest)
    yield from _output_problems(manifest)
    yield from _position_problems(manifest.positions, manifest.max_len)
    yield from _attention_problems(manifest)
    yield from _sentence_problems(manifest)
    yield from _repeated("graphs", (f"{graph.lowering} in {graph.dtype}" for graph in manifest.graphs))
    for index, engine in enumerate(manifest.engines):
        yield from _engine_problems(f"engines[{index}]", engine)


def _input_problems(manifest: Manifest) -> Iterator[str]:
    yield from _repeated("inputs", (spec.name for spec in manifest.inputs))
    bounds = {spec.bound for spec in manifest.inputs if spec.has_memory_axis}
    if len(bounds) > 1:
        yield f"inputs has memories of {' and '.join(map(str, sorted(map(str, bounds))))} tokens; they must be equal"
    if manifest.document_tokens is not None and not manifest.recurrent_states:
        yield f"document_tokens is {manifest.document_tokens}, but no input has the role recurrent_state"
    roles = Counter(spec.role for spec in manifest.inputs)
    for role in Role:
        if role in _ONE_OF_ROLE and roles[role] != 1:
            yield f"inputs has {roles[role]} of the role {role.value}; exactly one is needed"
        elif role is not Role.RECURRENT_STATE and roles[role] > 1:
            yield f"inputs has {roles[role]} of the role {role.value}; at most one is allowed"
    for index, spec in enumerate(manifest.inputs):
        yield from (f"inputs[{index}]{problem}" for problem in _problems_of_input(spec, manifest.outputs))


def _problems_of_input(spec: InputSpec, outputs: Iterable[TensorSpec]) -> Iterator[str]:
    if spec.default.fill not in _FILLS_OF_ROLE[spec.role]:
        fills = " or ".join(fill.value for fill in _FILLS_OF_ROLE[spec.role])
        yield f".default.fill should be {fills} for {spec.role.value}, not {spec.default.fill.value}"
    if (spec.default.token_id is None) == (spec.default.fill in _FILLS_BY_TOKEN):
        yield f".default.token_id is {spec.default.token_id} for the fill {spec.default.fill.value}"
    counts = spec.role is Role.RECURRENT_STATE and spec.shape == ("batch", 1)
    is_bounded = spec.role in (Role.TOKEN_TYPES, Role.GLOBAL_ATTENTION_MASK) or spec.has_memory_axis or counts
    if spec.bound is not None and not is_bounded:
        yield (
            f".bound is {spec.bound}; only token types, global_attention_mask, memory caches and states that count "
            "tokens have a bound"
        )
    if spec.role is not Role.RECURRENT_STATE:
        if spec.fed_from is not None:
            yield f".fed_from is {spec.fed_from}; only recurrent states are fed from an output"
        if spec.dtype != "int64" or spec.shape != ("batch", "tokens"):
            yield f" should be int64 [batch, tokens], not {_described(spec)}"
        return
    sizes = spec.shape[2 if spec.has_memory_axis else 1 :]
    if spec.dtype != "float32" or spec.shape[:1] != ("batch",) or not all(isinstance(size, int) for size in sizes):
        yield f" should be float32 [batch, ...] or [batch, memory, ...] with sizes, not {_described(spec)}"
    if spec.has_memory_axis and spec.bound is None:
        yield ".bound is None; a memory cache needs its maximum size"
    if spec.fed_from is None:
        yield ".fed_from is None; a recurrent state needs the name of an output"
        return
    output = next((output for output in outputs if output.name == spec.fed_from), None)
    if output is None or output.shape != spec.shape:
        actual = "there is none" if output is None else f"that is {_described(output)}"
        yield f" is {_described(spec)}, fed from the output {spec.fed_from}, but {actual}"


def _output_problems(manifest: Manifest) -> Iterator[str]:
    outputs = {spec.name: spec for spec in manifest.outputs}
    yield from _repeated("outputs", (spec.name for spec in manifest.outputs))
    for index, spec in enumerate(manifest.outputs):
        named = 2 if spec.has_tokens_axis or spec.has_memory_axis else 1
        sizes = spec.shape[named:]
        if spec.dtype != "float32" or spec.shape[:1] != ("batch",) or not all(isinstance(size, int) for size in sizes):
            yield f"outputs[{index}] should be float32 [batch, ...] or [batch, tokens, ...], not {_described(spec)}"
    task = format_of(manifest.task)
    for name, axes in task.output_axes.items():
        if name not in outputs:
            yield f"outputs has no {name}, which {manifest.task} needs"
        elif len(outputs[name].shape) != len(axes) or ("tokens" in outputs[name].shape) != ("tokens" in axes):
            yield f"outputs: {name} should be [{', '.join(axes)}], not {_described(outputs[name])}"
        elif axes[-1] == "hidden_size" and outputs[name].shape[-1] != manifest.hidden_size:
            yield f"outputs: {name} is {_described(outputs[name])}, but hidden_size is {manifest.hidden_size}"
    yield from task.problems(manifest)
    if manifest.labels and "logits" not in outputs:
        yield f"labels has {len(manifest.labels)} names, but there are no logits"
    elif manifest.labels and outputs["logits"].shape[-1] != len(manifest.labels):
        yield f"labels has {len(manifest.labels)} names for logits {_described(outputs['logits'])}"


def _position_problems(positions: Positions, max_len: int) -> Iterator[str]:
    if positions.rows != max_len:
        yield f"positions.rows is {positions.rows}, but max_len is {max_len}"
    if (positions.alpha is None) == (positions.scheme == "hierarchical"):
        yield f"positions.alpha is {positions.alpha} for the scheme {positions.scheme}; only hierarchical has one"
    if positions.attention_scale == "logn" and positions.trained is None:
        yield "positions.trained is None; the attention scale logn needs the positions that the model was trained with"
    if positions.rope_factor is not None and positions.form != "computed":
        yield f"positions.rope_factor is {positions.rope_factor} for the form {positions.form}; only computed has one"


def _attention_problems(manifest: Manifest) -> Iterator[str]:
    for index, record in enumerate(manifest.attention):
        name = record.get("type")
        if not isinstance(name, str) or not name:
            yield f"attention[{index}].type should be the name of an attention type, not {name!r}"
    yield from _repeated("attention", (str(record.get("type")) for record in manifest.attention))


def _sentence_problems(manifest: Manifest) -> Iterator[str]:
    settings = manifest.sentence
    has_input = manifest.input_of(Role.POOLED) is not None
    if has_input == (settings is None or settings.include_prompt):
        yield f"inputs has {int(has_input)} of the role pooled, which tells a prompt that is not pooled"
    own = None if settings is None else settings.multi_vector
    adds_unseen = own is not None and own.expansion is not None and not own.expansion.attend
    if (manifest.input_of(Role.ATTENDED) is not None) != adds_unseen:
        yield f"inputs has {int(not adds_unseen)} of the role attended, which tells tokens that no token attends to"
    if settings is None:
        if format_of(manifest.task).needs_settings:
            yield f"sentence is None, without which nothing can be made of the outputs of {manifest.task}"
        return
    if (settings.kind == "multi-vector-encoder") != (own is not None):
        yield f"sentence.multi_vector is {'there' if own else None} for the kind {settings.kind}"
    if settings.default_prompt_name not in (None, "query", "document", *settings.prompts):
        yield f"sentence.default_prompt_name is {settings.default_prompt_name!r}, which is not among the prompts"
    if settings.kind != format_of(manifest.task).settings_kind:
        yield f"sentence.kind is {settings.kind} for the task {manifest.task}"
    if (settings.kind == "cross-encoder") == (settings.activation is None):
        yield f"sentence.activation is {settings.activation} for the kind {settings.kind}"
    if settings.pair_template is not None:
        if settings.kind != "cross-encoder":
            yield f"sentence.pair_template is there for the kind {settings.kind}, which reads no pairs"
        yield from _wording_problems("pair_template", settings.pair_template, ("query", "document"))
    if settings.text_template is not None:
        if settings.kind not in ("encoder", "sparse-encoder"):
            yield f"sentence.text_template is there for the kind {settings.kind}, which reads no texts in a template"
        yield from _wording_problems("text_template", settings.text_template, ("text",))


def _wording_problems(name: str, template: PairTemplate | TextTemplate, needed: tuple[Slot, ...]) -> Iterator[str]:
    allowed = {"plain": needed, "prompted": (*needed, "prompt")}
    for key, wording in (("plain", template.plain), ("prompted", template.prompted)):
        slots = [part.slot for part in wording.parts] if wording else list(needed)
        if len(set(slots)) < len(slots) or not set(needed) <= set(slots) <= set(allowed[key]):
            are = "are" if len(needed) > 1 else "is"
            yield (
                f"sentence.{name}.{key}.parts has the slots {', '.join(slots) or '(none)'}; {' and '.join(needed)} "
                f"{are} needed, and each of {', '.join(allowed[key])} is allowed once"
            )


def _engine_problems(where: str, engine: EngineFile) -> Iterator[str]:
    if not engine.profiles:
        yield f"{where}.profiles is empty"
    for index, profile in enumerate(engine.profiles):
        for axis in (profile.batch, profile.tokens, profile.memory):
            if axis is not None and list(axis) != sorted(axis):
                yield f"{where}.profiles[{index}] should be (min, opt, max), not {axis}"


def _repeated(where: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{where} has {count} of {name}"


def _described(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"
