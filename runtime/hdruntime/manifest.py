"""The manifest of a bundle: what is inside, as dataclasses, and its JSON form."""

from __future__ import annotations

__all__ = [
    "Backend",
    "EngineFile",
    "FileRecord",
    "GlobalAttention",
    "GraphFile",
    "Manifest",
    "Positions",
    "ProfileShape",
    "TensorSpec",
    "TokenizerInfo",
    "Window",
    "json_from_manifest",
    "manifest_from_json",
]

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hdruntime.constants import FORMAT_VERSION
from hdruntime.errors import BundleCorruptError, BundleVersionError


class Backend(str, Enum):
    """What runs a bundle."""

    ONNXRUNTIME = "onnxruntime"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt_rtx"
    TENSORRT_LEAN = "tensorrt_lean"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An input or output of the graphs; ``shape`` mixes names and sizes: ``("batch", "tokens", 384)``."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How the position table was extended.

    Attributes:
        scheme: ``hierarchical``, ``tile`` or ``none``.
        alpha: the hierarchical scheme's alpha, else None.
        base: rows of the checkpoint's table that were usable.
        rows: positions served, equal to ``max_len``.
        first_row: row of the checkpoint's table that holds the first position (``padding_idx + 1``, or 0).
        form: ``folded`` into one table, ``factored`` into two lookups and an add, or ``computed``: there is no table.
    """

    scheme: str
    alpha: float | None
    base: int
    rows: int
    first_row: int
    form: str


@dataclass(frozen=True, kw_only=True)
class Window:
    """Windowed attention in place of a model's dense one, as ``--attention window:...`` asks for it.

    Attributes:
        tokens: tokens that a query sees on *each* side, in units of the dilation; Longformer's ``attention_window``
            counts both sides.
        global_tokens: the first real tokens of a text, which see all others and are seen by all; 0 for none.
        dilation: tokens that a step of the window is: one value a head, or a single one for all heads.
    """

    tokens: int
    global_tokens: int
    dilation: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GlobalAttention:
    """The input ``global_attention_mask``: what it is when a caller leaves it out, and what it may hold.

    Attributes:
        default: ``first_token`` of each text, or ``question``: the tokens before the first separator.
        bound: the most global tokens that a text may have.
        separator_id: id of the token that ends a question; None where the default is the first token.
    """

    default: str
    bound: int
    separator_id: int | None


@dataclass(frozen=True, kw_only=True)
class GraphFile:
    """An ONNX graph; ``lowering`` is ``portable`` or ``onnxruntime_cpu``."""

    file: str
    lowering: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class ProfileShape:
    """One optimisation profile of an engine: (min, opt, max) of each dynamic axis."""

    batch: tuple[int, int, int]
    tokens: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """A TensorRT engine; `hdruntime.passport` has what these mean.

    Attributes:
        file: the engine.
        passport: a JSON file beside it.
        flavour: ``tensorrt`` or ``tensorrt_rtx``, which built it.
        version_compatible: whether later versions run it too, and TensorRT's lean runtime.
    """

    file: str
    passport: str
    flavour: str
    version: str
    precision: str
    architectures: tuple[str, ...]
    profiles: tuple[ProfileShape, ...]
    version_compatible: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer's file and the ids that the runtime needs."""

    file: str
    pad_token_id: int
    pad_token: str
    unk_token_id: int | None
    mask_token_id: int | None


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file of the bundle must be: its SHA-256 in hexadecimal and its size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a bundle says about itself.

    Attributes:
        dtype: of the portable graph, ``float32``, ``float16`` or ``bfloat16``; outputs are float32 always.
        attention: attention operator -> number of nodes, in the portable graph.
        windows: tokens on each side of the window of each ``SlidingWindowAttention``, in graph order.
        window: what replaced the model's dense attention, None where nothing did.
        global_attention: about the input ``global_attention_mask``, None where there is none.
        labels: names of the classes in the order of the logits, ``()`` when the task has none.
        verification: what ``hdexport verify`` found (JSON values, finite numbers), None when it did not run.
        made_by: versions, command, date and source of the build.
        files: every file but the manifest, POSIX path relative to the bundle -> record.
    """

    format_version: int
    name: str
    model_type: str
    task: str
    max_len: int
    dtype: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    parameters: int
    positions: Positions
    attention: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graphs: tuple[GraphFile, ...]
    engines: tuple[EngineFile, ...]
    tokenizer: TokenizerInfo | None
    labels: tuple[str, ...]
    verification: dict[str, object] | None
    made_by: dict[str, str]
    files: dict[str, FileRecord]
    windows: tuple[int, ...] = ()
    window: Window | None = None
    global_attention: GlobalAttention | None = None


def json_from_manifest(manifest: Manifest) -> str:
    """The text of ``manifest.json``: indented, keys in the order of the dataclass.

    Raises:
        ValueError: ``verification`` holds NaN or infinity, which JSON cannot.
    """
    return json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def manifest_from_json(text: str | bytes) -> Manifest:
    """Read the text of ``manifest.json``; keys that this version does not know are ignored.

    Raises:
        BundleCorruptError: not JSON, or a key is missing or of another type; the message names the key.
        BundleVersionError: written in a newer format.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleCorruptError(
            f"The manifest is not valid JSON: {error}.\nRebuild or copy the bundle again."
        ) from None
    # The version comes first: a newer format may have other keys.
    version = data.get("format_version") if isinstance(data, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise BundleVersionError(
            f"The bundle has format version {version}; this hdexport reads up to {FORMAT_VERSION}.\n"
            "Update it with: pip install -U hdexport"
        )
    manifest: Manifest = _decoded(data, Manifest, "manifest")
    if manifest.format_version < 1:
        raise _wrong("manifest.format_version", "1 or more", manifest.format_version)
    for name in ("max_len", "vocab_size"):
        if getattr(manifest, name) < 1:
            raise _wrong(f"manifest.{name}", "1 or more", getattr(manifest, name))
    return manifest


def _decoded(value: Any, hint: Any, where: str) -> Any:
    """The value that ``json`` gave, as the type in ``hint``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _decoded_dataclass(value, typing.cast(type, hint), where)
    if origin in (typing.Union, types.UnionType):
        return _decoded_union(value, arguments, where)
    if origin is tuple:
        return _decoded_tuple(value, arguments, where)
    if origin is dict:
        _require_type(value, dict, where)
        return {key: _decoded(item, arguments[1], f"{where}[{key!r}]") for key, item in value.items()}
    if hint is object:
        return value
    if hint is float and type(value) is int:
        return float(value)
    _require_type(value, hint, where)
    return value


def _decoded_dataclass(value: Any, cls: type, where: str) -> Any:
    _require_type(value, dict, where)
    hints = typing.get_type_hints(cls)
    # A key that came later than the format has a default, so that older bundles stay readable.
    required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
    missing = [name for name in hints if name in required and name not in value]
    if missing:
        raise BundleCorruptError(f"The manifest lacks {where}.{missing[0]}.\nRebuild or copy the bundle again.")
    given = {name: hint for name, hint in hints.items() if name in value}
    return cls(**{name: _decoded(value[name], hint, f"{where}.{name}") for name, hint in given.items()})


def _decoded_union(value: Any, alternatives: tuple[Any, ...], where: str) -> Any:
    if value is None and types.NoneType in alternatives:
        return None
    scalars = [kind for kind in alternatives if kind is not types.NoneType]
    for kind in scalars:
        if type(value) is kind:
            return value
    return _decoded(value, scalars[-1], where)


def _decoded_tuple(value: Any, arguments: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    _require_type(value, list, where)
    if arguments[-1] is Ellipsis:
        return tuple(_decoded(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise _wrong(where, f"a list of {len(arguments)}", value)
    return tuple(
        _decoded(item, hint, f"{where}[{i}]") for i, (item, hint) in enumerate(zip(value, arguments, strict=True))
    )


_NAME_OF_TYPE = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


def _require_type(value: Any, kind: type, where: str) -> None:
    # `type() is`, not isinstance: True is an int in Python, and is none in a manifest.
    if type(value) is not kind:
        raise _wrong(where, _NAME_OF_TYPE[kind], value)


def _wrong(where: str, expected: str, value: Any) -> BundleCorruptError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return BundleCorruptError(f"{where} should be {expected}, not {shown}.\nRebuild or copy the bundle again.")
