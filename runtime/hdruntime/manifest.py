"""The manifest of a bundle: what is inside, as dataclasses, and its JSON form."""

from __future__ import annotations

__all__ = [
    "Backend",
    "BlockSparse",
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

import json
from dataclasses import dataclass
from enum import Enum

from hdruntime.constants import FORMAT_VERSION
from hdruntime.errors import BundleCorruptError, BundleVersionError
from hdruntime.typed_json import (
    JsonMismatchError,
    MissingKeyError,
    WrongValueError,
    decoded,
    json_from_dataclass,
)


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
class BlockSparse:
    """Block-sparse attention: a checkpoint's own, or what ``--attention bigbird|etc|blocks`` put in its place.

    Attributes:
        kind: ``bigbird``: the first and the last block and a window of three blocks, and random ones; ``etc``: global
            tokens in front of the text and the window; ``blocks``: what a list says.
        block_size: tokens of a block.
        mode: where blocks beyond that come from: ``hf_eval``, every random block is block 0, as Hugging Face has it
            outside of training; ``table``, a table of random blocks; ``lists``, the list of kind ``blocks``; ``none``.
        random_blocks: random blocks of each row of blocks; 0 for other kinds than ``bigbird``.
        global_tokens: tokens in front of each text that ``etc`` adds; 0 for other kinds.
        last_block: ``padded``: the last block is that of the padded batch, as in Hugging Face, so a text's answer
            depends on the padding; ``row``: it is that of each text, and padding changes nothing.
        dense_tokens: the longest text that is attended to densely; 0 for none. With ``padded`` its padding counts.
    """

    kind: str
    block_size: int
    mode: str
    random_blocks: int
    global_tokens: int
    last_block: str
    dense_tokens: int


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
        window: the windows that replaced the model's dense attention, None where none did.
        block_sparse: block-sparse attention, the model's own or in place of its dense one; None where there is none.
        global_attention: about the input ``global_attention_mask``, None where there is none.
        token_type_separator_id: where a caller gives no token types, they are 0 up to the first token of this id and 1
            behind it; None: they are 0.
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
    block_sparse: BlockSparse | None = None
    global_attention: GlobalAttention | None = None
    token_type_separator_id: int | None = None


def json_from_manifest(manifest: Manifest) -> str:
    """The text of ``manifest.json``: indented, keys in the order of the dataclass.

    Raises:
        ValueError: ``verification`` holds NaN or infinity, which JSON cannot.
    """
    return json_from_dataclass(manifest)


def manifest_from_json(text: str | bytes) -> Manifest:
    """Read the text of ``manifest.json``; keys that this version does not know are ignored.

    Raises:
        BundleCorruptError: not JSON, or a key is missing or of another type; the message names the key.
        BundleVersionError: written in a newer format.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleCorruptError(f"The manifest is not valid JSON: {error}.\n{_COPY_AGAIN}") from None
    # The version comes first: a newer format may have other keys.
    version = data.get("format_version") if isinstance(data, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise BundleVersionError(
            f"The bundle has format version {version}; this hdexport reads up to {FORMAT_VERSION}.\n"
            "Update it with: pip install -U hdexport"
        )
    try:
        manifest: Manifest = decoded(data, Manifest, "manifest")
        for name in ("format_version", "max_len", "vocab_size"):
            if getattr(manifest, name) < 1:
                raise WrongValueError(f"manifest.{name}", "1 or more", getattr(manifest, name))
    except MissingKeyError as error:
        raise BundleCorruptError(f"The manifest lacks {error.where}.\n{_COPY_AGAIN}") from None
    except JsonMismatchError as error:
        raise BundleCorruptError(f"{error}.\n{_COPY_AGAIN}") from None
    return manifest


_COPY_AGAIN = "Rebuild or copy the bundle again."
