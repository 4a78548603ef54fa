"""The manifest of a bundle: what is inside, as dataclasses; `hdruntime.bundle.manifest_json` reads and writes them."""

from __future__ import annotations

__all__ = [
    "Backend",
    "BlockSparse",
    "EngineFile",
    "FileRecord",
    "GlobalAttention",
    "GraphFile",
    "GraphVerification",
    "HalfRange",
    "Manifest",
    "Positions",
    "ProfileShape",
    "TensorSpec",
    "TokenizerInfo",
    "Verification",
    "Window",
]

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta

# What a value may be. `hdruntime.bundle.manifest_json` refuses others, and values that contradict each other.

Task = Literal[
    "feature-extraction",
    "sentence-similarity",
    "fill-mask",
    "text-classification",
    "token-classification",
    "question-answering",
]
Dtype = Literal["float32", "float16", "bfloat16"]
TensorDtype = Literal["int64", "float32"]
Scheme = Literal["hierarchical", "tile", "none"]
Form = Literal["folded", "factored", "computed"]
Lowering = Literal["portable", "onnxruntime_cpu", "onnxruntime_cuda"]
Flavour = Literal["tensorrt", "tensorrt_rtx"]
BlockKind = Literal["bigbird", "etc", "blocks"]
BlockMode = Literal["hf_eval", "table", "lists", "none"]
LastBlock = Literal["padded", "row"]
GlobalDefault = Literal["first_token", "question"]

_MOST_TOKENS = 2**24
"""More than any model has positions for; up to here float32, in which graphs divide by lengths, has every integer."""

_INT32_MAX = 2**31 - 1
"""The largest axis, id or number of layers that the backends index with."""

Length = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
TokenCount = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Size = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
LargeCount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(min_length=1)]


class Backend(str, Enum):
    """What runs a bundle."""

    ONNXRUNTIME = "onnxruntime"
    ONNXRUNTIME_CUDA = "onnxruntime_cuda"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt_rtx"
    TENSORRT_LEAN = "tensorrt_lean"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An input or output of the graphs; ``shape`` mixes names and sizes: ``("batch", "tokens", 384)``."""

    name: Name
    dtype: TensorDtype
    shape: tuple[str | Size, ...]


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

    scheme: Scheme
    alpha: float | None
    base: Length
    rows: Length
    first_row: TokenCount
    form: Form


@dataclass(frozen=True, kw_only=True)
class Window:
    """Windowed attention in place of a model's dense one, as ``--attention window:...`` asks for it.

    Attributes:
        tokens: tokens that a query sees on *each* side, in units of the dilation; Longformer's ``attention_window``
            counts both sides.
        global_tokens: the first real tokens of a text, which see all others and are seen by all; 0 for none.
        dilation: tokens that a step of the window is: one value a head, or a single one for all heads.
    """

    tokens: Length
    global_tokens: TokenCount
    dilation: tuple[Length, ...]


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

    kind: BlockKind
    block_size: Length
    mode: BlockMode
    random_blocks: Count
    global_tokens: TokenCount
    last_block: LastBlock
    dense_tokens: TokenCount


@dataclass(frozen=True, kw_only=True)
class GlobalAttention:
    """The input ``global_attention_mask``: what it is when a caller leaves it out, and what it may hold.

    Attributes:
        default: ``first_token`` of each text, or ``question``: the tokens before the first separator.
        bound: the most global tokens that a text may have.
        separator_id: id of the token that ends a question; None where the default is the first token.
    """

    default: GlobalDefault
    bound: Length
    separator_id: TokenId | None


@dataclass(frozen=True, kw_only=True)
class GraphFile:
    """An ONNX graph; ``lowering`` is ``portable``, ``onnxruntime_cpu`` or ``onnxruntime_cuda``."""

    file: str
    lowering: Lowering
    dtype: Dtype


@dataclass(frozen=True, kw_only=True)
class HalfRange:
    """The largest activation of a float16 graph, on text that was run in float32.

    Attributes:
        largest: its magnitude; None where it was infinite or NaN.
        limit: float16's largest number.
        operator: what the graph's node does that computes it.
        node: that node's name.
        module: of PyTorch's model, "encoder.layer.3.output.dense"; empty where it is not known.
        tokens: of each text.
        text: what the texts were, "English text" or "random ids".
    """

    largest: float | None
    limit: float
    operator: str
    node: str
    module: str
    tokens: tuple[Length, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class ProfileShape:
    """One optimisation profile of an engine: (min, opt, max) of each dynamic axis."""

    batch: tuple[Size, Size, Size]
    tokens: tuple[Size, Size, Size]


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """A TensorRT engine; `hdruntime.bundle.passport` has what these mean.

    Attributes:
        file: the engine.
        passport: a JSON file beside it.
        flavour: ``tensorrt`` or ``tensorrt_rtx``, which built it.
        version_compatible: whether later versions run it too, and TensorRT's lean runtime.
    """

    file: str
    passport: str
    flavour: Flavour
    version: str
    precision: Dtype
    architectures: tuple[str, ...]
    profiles: tuple[ProfileShape, ...]
    version_compatible: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer's file and the ids that the runtime needs."""

    file: str
    pad_token_id: TokenId
    pad_token: str
    unk_token_id: TokenId | None
    mask_token_id: TokenId | None


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file of the bundle must be: its SHA-256 in hexadecimal and its size."""

    sha256: Sha256
    size_bytes: LargeCount


@dataclass(frozen=True, kw_only=True)
class GraphVerification:
    """What is shown of one graph's verification; the manifest keeps what else `hdexport verify` wrote."""

    checks: Count = 0
    passed: Count = 0
    max_abs_error: float | None = None
    tolerance: str = ""
    sampled: tuple[dict[str, object], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What every `Manifest.verification` is; it may have other keys beside these."""

    passed: bool = False
    grid: Literal["quick", "full"] | None = None
    graphs: dict[str, GraphVerification] = field(default_factory=dict)
    not_checked: tuple[str, ...] = ()


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
        half_range: of the portable graph; None where it is not float16, or was not verified.
        labels: names of the classes in the order of the logits, ``()`` when the task has none.
        verification: what ``hdexport verify`` found (JSON values, finite numbers), None when it did not run; what
            `Verification` names is as it says.
        made_by: versions, command, date and source of the build.
        files: every file but the manifest, POSIX path relative to the bundle -> record.
    """

    format_version: Size
    name: str
    model_type: str
    task: Task
    max_len: Length
    dtype: Dtype
    hidden_size: Size
    vocab_size: Size
    num_layers: Size
    num_heads: Size
    parameters: LargeCount
    positions: Positions
    attention: dict[str, Size]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graphs: tuple[GraphFile, ...]
    engines: tuple[EngineFile, ...]
    tokenizer: TokenizerInfo | None
    labels: tuple[str, ...]
    verification: dict[str, object] | None
    made_by: dict[str, str]
    files: dict[str, FileRecord]
    windows: tuple[TokenCount, ...] = ()
    window: Window | None = None
    block_sparse: BlockSparse | None = None
    global_attention: GlobalAttention | None = None
    token_type_separator_id: TokenId | None = None
    half_range: HalfRange | None = None
