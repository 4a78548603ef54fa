"""The manifest of a bundle: its content, as dataclasses; `hdruntime.bundle.manifest_json` reads and checks it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from hdruntime.bundle.checked_json import Count, LargeCount, Length, Name, Sha256, Size, TokenCount, TokenId
from hdruntime.bundle.sentence_settings import PairTemplate, SentenceSettings, TextTemplate
from hdruntime.bundle.verification import VerificationRecord
from hdruntime.constants import KERNELS_FOLDER, WEIGHTS_FILE

_ARCHITECTURE_OF_KERNEL = re.compile(rf"^{KERNELS_FOLDER}/.*-sm(\d+)-\w+\.cubin$")

# Types of values. `hdruntime.bundle.manifest_json` rejects other values, and values that contradict each other.

Dtype = Literal["float32", "float16", "bfloat16"]
TensorDtype = Literal["int64", "float32"]
AttentionScale = Literal["logn", "none"]
Side = Literal["right", "left"]
TokenizerSource = Literal["library", "file"]
GraphDtype = Literal["float32", "float16", "bfloat16", "int8"]
TensorRtVariant = Literal["tensorrt", "tensorrt_rtx"]


class Backend(StrEnum):
    """The library and device that run a bundle."""

    ONNXRUNTIME = "onnxruntime"
    ONNXRUNTIME_CUDA = "onnxruntime_cuda"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt_rtx"
    TENSORRT_LEAN = "tensorrt_lean"


class Task(StrEnum):
    """The task of a bundle, by its name in Hugging Face optimum if it has one."""

    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    SPARSE_SIMILARITY = "sparse-similarity"
    """A weight for each token of the vocabulary, pooled of the logits of a text's tokens, as SPLADE has it."""
    TOKEN_SIMILARITY = "token-similarity"
    """A vector for each token, as ColBERT has it."""
    HYBRID_SIMILARITY = "hybrid-similarity"
    """A vector for the text, a weight and a vector for each token, as BGE-M3 has them."""
    FILL_MASK = "fill-mask"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    TEXT_SCORING = "text-scoring"
    """The log-probability of each token after the tokens before it."""


class Scheme(StrEnum):
    """The source of the rows after the checkpoint's last."""

    HIERARCHICAL = "hierarchical"
    """Hierarchical decomposition: n rows give n * n different ones."""
    TILE = "tile"
    """The checkpoint's rows over and over, as Longformer's initialisation did; any number of positions."""
    INTERPOLATE = "interpolate"
    """Between the checkpoint's rows, which each text longer than the table spreads over its own length."""
    INTERPOLATE_STATIC = "interpolate:static"
    """Between the checkpoint's rows, which are spread over the longest input, for texts of any length."""
    GROUP = "group"
    """The checkpoint's rows, each for a group of neighbouring tokens; how many is by a text's own length."""
    NONE = "none"
    """Nowhere: at most the checkpoint's own rows."""


class PositionForm(StrEnum):
    """How a graph holds the table."""

    FOLDED = "folded"
    """One table with a row per position."""
    FACTORED = "factored"
    """Two small tables that are looked up and added: see `FactoredTable`."""
    BY_LENGTH = "by_length"
    """The checkpoint's table, looked up by each text's own length."""
    COMPUTED = "computed"
    """No table: positions are computed in the graph, as rotary ones are."""
    DISTANCES = "distances"
    """No positions: scores are of distances, of which there are any number."""


class Role(StrEnum):
    """The purpose of an input."""

    IDS = "ids"
    """[batch, tokens], int64: the tokens."""
    MASK = "mask"
    """[batch, tokens], int64: 1 for real tokens, 0 for padding."""
    TOKEN_TYPES = "token_types"
    """[batch, tokens], int64: which of a pair's texts a token is of."""
    GLOBAL_ATTENTION_MASK = "global_attention_mask"
    """[batch, tokens], int64: 1 for tokens with global attention; see `InputSpec.bound`."""
    POOLED = "pooled"
    """[batch, tokens], int64: 1 for tokens that a sentence's vector is pooled of, 0 for tokens of its prompt."""
    ATTENDED = "attended"
    """[batch, tokens], int64: 1 for tokens that others attend to, 0 for real tokens that only attend."""
    RECURRENT_STATE = "recurrent_state"
    """[batch, ...] or [batch, memory, ...], float32, other axes sizes: an output of the previous call; see
    `InputSpec.fed_from`. All axes ``memory`` of a call's inputs and outputs have one size."""


class Fill(StrEnum):
    """The default value of an input; rules about tokens consider only real tokens."""

    REQUIRED = "required"
    """The caller must provide it."""
    ZEROS = "zeros"
    ONES = "ones"
    FIRST_TOKEN = "first_token"
    """1 at the first token of a row, else 0."""
    UNTIL_TOKEN = "until_token"
    """1 at the tokens before the first of an id, else 0; a row without the id is rejected."""
    AFTER_TOKEN = "after_token"
    """0 up to the first token of an id, then 1; in a row without one, 1 from its second token on."""


@dataclass(frozen=True, kw_only=True)
class Default:
    """The default value of an input; `token_id` is None for rules without an id."""

    fill: Fill
    token_id: TokenId | None = None


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An output of the graphs; ``shape`` mixes names and sizes: ``("batch", "tokens", 384)``."""

    name: Name
    dtype: TensorDtype
    shape: tuple[str | Size, ...]

    @property
    def has_tokens_axis(self) -> bool:
        """Whether the axis after the batch is the tokens'."""
        return self.shape[1:2] == ("tokens",)

    @property
    def has_memory_axis(self) -> bool:
        """Whether the axis after the batch is that of a memory cache: tokens of earlier calls."""
        return self.shape[1:2] == ("memory",)


@dataclass(frozen=True, kw_only=True)
class InputSpec(TensorSpec):
    """An input of the graphs.

    Attributes:
        role: its purpose.
        default: its value if a caller omits it.
        bound: maximum, by role; None for other inputs. Token types: number of types, None in bundles that do not say.
            Global attention mask: maximum of global tokens in a row, None for any number. Recurrent state with an axis
            ``memory``: maximum size of the axis. Recurrent state [batch, 1] that counts the tokens of a document:
            maximum of tokens, with the tokens of the call. The number of ids is `Manifest.vocab_size`.
        fed_from: for a recurrent state, the output of the previous call that it is fed from; another name, because
            names in a graph are unique. None for other roles.
    """

    role: Role
    default: Default
    bound: Length | None = None
    fed_from: Name | None = None


@dataclass(frozen=True, kw_only=True)
class PaddingRule:
    """How far a row may be padded before its result changes, in models whose attention depends on the padded length.

    Attributes:
        multiple_of: a row may be padded up to the next multiple of so many tokens.
        free_up_to: rows of up to so many tokens may be padded up to that many; 0 for no such exception.
    """

    multiple_of: Length
    free_up_to: TokenCount = 0


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How the position table was extended.

    Attributes:
        scheme: how the build made the new positions.
        alpha: the hierarchical scheme's alpha, else None.
        base: rows of the checkpoint's table that were usable.
        rows: positions served, equal to ``max_len``.
        first_row: row of the checkpoint's table that holds the first position (``padding_idx + 1``, or 0).
        form: ``folded`` into one table, ``factored`` into two lookups and an add, ``by_length``: looked up in the
            checkpoint's rows by each text's own length, ``computed``: there is no table, or ``distances``: there are no
            positions but distances, of which any number is served.
        attention_scale: ``logn`` where queries are multiplied by max(1, ln n / ln trained), n being the tokens of a
            text that they attend to; else ``none``.
        trained: positions that the model was trained with before it was extended, which may be fewer than `base`; None
            in bundles that do not say.
        rope_factor: factor of the base of rotary positions in layers that attend to the whole text; None where the base
            is the checkpoint's.
        reason: why scheme, alpha and scale are these, as half a sentence; empty in bundles that do not say.
    """

    scheme: Scheme
    alpha: float | None
    base: Length
    rows: Length
    first_row: TokenCount
    form: PositionForm
    attention_scale: AttentionScale = "none"
    trained: Length | None = None
    rope_factor: Annotated[float, Meta(gt=1)] | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class GraphFile:
    """An ONNX graph; one of each lowering and dtype.

    Attributes:
        lowering: name of the backend's form of the graph, such as ``portable``; see `BackendEntry.lowerings`.
        dtype: dtype of the graph's matmuls with weights. Other nodes of an ``int8`` graph compute in float32.
        operators: operator, with its domain where it is not ONNX's -> number of nodes, those in bodies of loops and in
            branches included, the most frequent first.
    """

    file: str
    lowering: Name
    dtype: GraphDtype
    operators: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class KernelNode:
    """Nodes of the graphs for a GPU that compiled kernels can compute; one for those that are alike.

    Attributes:
        op_type: the nodes' type, which is the name of their function in the graph.
        operator: name of the operator.
        shapes: shapes of the inputs; axes that vary are 1.
        attributes: attributes of the nodes; a list for several numbers.
        architectures: the GPU architectures on which kernels compute them, e.g. ``("sm90",)``; None for all.
    """

    op_type: Name
    operator: Name
    shapes: tuple[tuple[Size, ...], ...]
    attributes: dict[str, int | float | list[int]]
    architectures: tuple[str, ...] | None = None

    @property
    def operator_attributes(self) -> dict[str, int | float | tuple[int, ...]]:
        """The attributes, a tuple for several numbers."""
        return {name: tuple(value) if isinstance(value, list) else value for name, value in self.attributes.items()}

    def is_for(self, architecture: str) -> bool:
        """Whether kernels compute the nodes on GPUs of an architecture, e.g. ``sm90``."""
        return self.architectures is None or architecture in self.architectures


@dataclass(frozen=True, kw_only=True)
class Fp16Overflow:
    """The largest activation of a float16 graph, on text that was run in float32.

    Attributes:
        largest: magnitude of the activation; None if it was infinite or NaN.
        limit: largest number of float16.
        operator: operator of the node that computes the activation.
        node: name of the node.
        module: module of the PyTorch model, such as "encoder.layer.3.output.dense"; empty if it is unknown.
        tokens: tokens of each text.
        text: kind of the texts, "English text" or "random ids".
    """

    largest: float | None
    limit: float
    operator: str
    node: str
    module: str
    tokens: tuple[Length, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Int8Calibration:
    """The calibration of the int8 graphs, and its result.

    Attributes:
        texts: name of the file with the texts, "English text" or "random ids"; None without calibration, where
            activations are quantized while a graph runs.
        count: number of token sequences, which are texts, and sentences and beginnings of them.
        tokens: tokens of all texts together.
        int8_weights: number of weights that are int8.
        float_weights: names of the linear layers' weights that stay in float, because int8 changes the outputs too
            much.
        min_cosine: smallest cosine between an output of the int8 graph and of the float graph, on other texts; None
            without calibration.
    """

    texts: str | None = None
    count: Count = 0
    tokens: Count = 0
    int8_weights: Count
    float_weights: tuple[str, ...] = ()
    min_cosine: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProfileShape:
    """One optimisation profile of an engine: (min, opt, max) of each dynamic axis; None for one that no input has."""

    batch: tuple[Size, Size, Size]
    tokens: tuple[Size, Size, Size]
    memory: tuple[Size, Size, Size] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineFile:
    """A TensorRT engine.

    Attributes:
        metadata: JSON file beside the engine; see `hdruntime.backends.tensorrt.engine_metadata`.
        variant: TensorRT variant that built the engine.
        version: version of the variant's package. Only this version runs an engine that is not version compatible.
        precision: dtype of the graph's weights.
        architectures: GPU architectures that the engine runs on, e.g. ``sm89``.
        version_compatible: whether later versions and TensorRT's lean runtime run the engine, too.
    """

    file: str
    metadata: str
    variant: TensorRtVariant
    version: str
    precision: Dtype
    architectures: tuple[str, ...]
    profiles: tuple[ProfileShape, ...]
    version_compatible: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer's file and the ids that the runtime needs.

    Attributes:
        token_types: whether the model reads the tokenizer's token types; otherwise the input has its default.
        truncation_side: end at which the checkpoint's tokenizer truncates texts.
        model_max_length: number of tokens to which the checkpoint's tokenizer truncates texts, where the model has more
            positions.
        text_length: number of tokens to which encoders truncate texts by default, as requested by the build; None for
            the model's number.
        source: ``library`` where the file gives the ids of transformers' tokenizer class, ``file`` where it is the
            checkpoint's ``tokenizer.json``.
    """

    file: str
    pad_token_id: TokenId
    pad_token: str
    unk_token_id: TokenId | None
    mask_token_id: TokenId | None
    token_types: bool = True
    truncation_side: Side = "right"
    model_max_length: Length | None = None
    text_length: Length | None = None
    source: TokenizerSource = "library"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The SHA-256 of a file of the bundle, in hexadecimal, and its size."""

    sha256: Sha256
    size_bytes: LargeCount


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a bundle says about itself.

    Attributes:
        dtype: dtype of the portable graph; outputs are always float32.
        operators: name of an hdexport operator -> number of nodes in the portable graph.
        kernel_nodes: attention nodes of the graphs that compiled kernels can compute.
        attention: the record of each attention type in the model: JSON objects with the type's name in ``type``.
            The runtime ignores them.
        inputs: inputs of the graphs, with roles, defaults and bounds.
        padding: limit of padding of rows; None without a limit.
        sentence: settings with which sentence-transformers runs the checkpoint; None for tasks without such settings.
        fp16_overflow: overflow check of the portable graph; None if the graph is not float16 or was not verified.
        int8: calibration of the int8 graphs; None without int8 graphs.
        ffn_chunk: maximum number of tokens that a feed-forward network computes at once in the graphs for ONNX Runtime
            other than the portable graph; None for all tokens of a batch.
        document_tokens: maximum number of real tokens of a document in all its segments, because positions continue
            from segment to segment. None for any number, and for models without recurrent states.
        adapter: name of the checkpoint's adapter that was merged into the weights; None without an adapter.
        labels: names of the classes in the order of the logits; ``()`` for tasks without classes.
        verification: outcome of the comparison with PyTorch; None if there was no comparison.
        branches: lengths in tokens at which the model's Python code takes another branch than in the exported trace.
            A verification compares these lengths.
        unverified: whether the model type has no family and the build was told not to compare the bundle with PyTorch.
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
    operators: dict[str, Size]
    attention: tuple[dict[str, object], ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graphs: tuple[GraphFile, ...]
    engines: tuple[EngineFile, ...]
    tokenizer: TokenizerInfo | None
    labels: tuple[str, ...]
    verification: VerificationRecord | None
    made_by: dict[str, str]
    files: dict[str, FileRecord]
    kernel_nodes: tuple[KernelNode, ...] = ()
    padding: PaddingRule | None = None
    fp16_overflow: Fp16Overflow | None = None
    sentence: SentenceSettings | None = None
    ffn_chunk: Length | None = None
    document_tokens: Length | None = None
    int8: Int8Calibration | None = None
    adapter: Name | None = None
    branches: tuple[Length, ...] = ()
    unverified: bool = False

    def input_of(self, role: Role) -> InputSpec | None:
        """The first input of a role, or None."""
        return next((spec for spec in self.inputs if spec.role is role), None)

    def number_of_values(self, spec: InputSpec) -> int | None:
        """Number of values that an input's elements may have, which are integers from 0 on. None without a limit, and
        for recurrent states, which are floats."""
        if spec.role is Role.IDS:
            return self.vocab_size
        if spec.role is Role.TOKEN_TYPES:
            return spec.bound
        return None if spec.role is Role.RECURRENT_STATE else 2

    def padding_limit(self, tokens: int) -> int:
        """Maximum length in tokens to which a row may be padded without a change of its outputs.

        ``sys.maxsize`` without a limit.

        Rows with the same limit may share a batch.

        Args:
            tokens: number of tokens of the row, 1 or more, including padding that counts.
        """
        if self.padding is None:
            return sys.maxsize
        multiple = self.padding.multiple_of
        return max(-(-tokens // multiple) * multiple, self.padding.free_up_to)

    @property
    def stores_half_weights(self) -> bool:
        """Whether most weights are stored in half precision, whatever dtype the graphs compute in."""
        weights = self.files.get(WEIGHTS_FILE)
        return weights is not None and weights.size_bytes < 3 * self.parameters

    @property
    def template(self) -> PairTemplate | TextTemplate | None:
        """Writes the texts or pairs of sessions; None where the tokenizer takes them as they are. Token vectors
        (``feature-extraction``) are transformers' of plain texts, whatever an encoder pools."""
        if self.sentence is None:
            return None
        of_texts = None if self.task is Task.FEATURE_EXTRACTION else self.sentence.text_template
        return self.sentence.pair_template or of_texts

    @property
    def operator_names(self) -> frozenset[str]:
        """Names of the operators, without their domain."""
        return frozenset(name.rpartition("::")[2] for name in self.operators)

    @property
    def kernel_architectures(self) -> tuple[str, ...]:
        """The GPU architectures that the bundle's kernels were compiled for, e.g. ``("sm86", "sm120")``."""
        numbers = {int(number) for name in self.files for number in _ARCHITECTURE_OF_KERNEL.findall(name)}
        return tuple(f"sm{number}" for number in sorted(numbers))

    @property
    def recurrent_states(self) -> tuple[InputSpec, ...]:
        """The inputs that outputs of the previous call feed."""
        return tuple(spec for spec in self.inputs if spec.role is Role.RECURRENT_STATE)

    @property
    def result_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs that are not recurrent states."""
        fed = {spec.fed_from for spec in self.recurrent_states}
        return tuple(spec for spec in self.outputs if spec.name not in fed)

    @property
    def max_memory(self) -> int:
        """The most tokens of an axis ``memory``; 0 without one."""
        return max((spec.bound or 0 for spec in self.recurrent_states if spec.has_memory_axis), default=0)

    @property
    def min_memory(self) -> int:
        """Tokens of the axis ``memory`` of a text of one segment: all if tokens not yet there are attended to."""
        attended = any(spec.has_memory_axis and spec.default.fill is Fill.ONES for spec in self.recurrent_states)
        return self.max_memory if attended else min(1, self.max_memory)

    @property
    def ids(self) -> str:
        """Name of the input of tokens."""
        return self._name_of(Role.IDS)

    @property
    def mask(self) -> str:
        """Name of the input that tells real tokens from padding."""
        return self._name_of(Role.MASK)

    def _name_of(self, role: Role) -> str:
        spec = self.input_of(role)
        assert spec is not None  # of every manifest that was read
        return spec.name
