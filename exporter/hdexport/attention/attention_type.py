"""The interface of an attention type: one subclass of `AttentionType` in each folder of `hdexport.attention`.

``hdexport build MODEL --attention window:256`` takes these steps:

1. `hdexport.attention.registry.attention_from_spec` finds the type whose syntax the value has. `AttentionType.request`
   makes a `WindowRequest`, which `BuildOptions.attention` holds under the type's name.
2. The pipeline loads the model. `AttentionType.conversion` fits the request to the model, or rejects it: a
   `WindowConversion`.
3. `AttentionConversion.adapt` puts nodes of hdexport's operator into the model's layers, and the model is traced.
4. `AttentionType.record` describes the conversion for the manifest. Each node gets the operator's function body
   (`hdplugins.attention`), and `hdexport.graph.targets` asks the node's `Lowering` for the nodes of each backend.
5. Verification knows the bundle alone: `AttentionType.read` makes a conversion of the record, `use_reference` gives
   transformers' model the same attention, and `boundaries` adds the lengths at which windows begin to matter.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hdexport.lowering.lowering import Lowering
from hdexport.model.family import Family
from hdexport.model.memory_cache import MemoryCache
from hdruntime.bundle.manifest import InputSpec, Manifest, PaddingRule, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import ModelError, Setting

if TYPE_CHECKING:
    import onnx_ir
    import torch
    from transformers import PreTrainedModel

    from hdexport.attention.query_scale import LogScale
    from hdruntime.arrays import IntArray

logger = logging.getLogger(__name__)

NOT_TRAINED = (
    "which the model was not trained with: answers on longer texts change, and fine-tuning is expected. Checks are "
    "against PyTorch with the same {}."
)
"""Note on a model whose attention is replaced; {} is the replacement, such as "windows"."""

DENSE_BASELINE = "does not use {}: its attention is dense, and its outputs are those of the unconverted model"
"""Note on the model of a benchmark's baselines, whose attention is dense; {} is the attention, such as "windows"."""


@dataclass(frozen=True)
class OperatorNode:
    """A node of one of hdexport's operators: its name and its attributes."""

    operator: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CliSyntax:
    """The syntax of a value of ``--attention`` that replaces dense attention by an attention type.

    Attributes:
        grammar: the syntax, such as ``window:W[,right:R]``.
        example: a value.
        summary: the attention type in a few words.
        help: the meaning of each part of the value, one sentence.
    """

    grammar: str
    example: str
    summary: str
    help: str


@dataclass(frozen=True, kw_only=True)
class ConversionContext:
    """The model that an attention type is fitted to, and the options of the build.

    Attributes:
        model: the model with `max_len` positions, in float32.
        family: the model's family.
        task: the bundle's task.
        max_len: maximum length of an input, in tokens.
        recurrence: tokens of earlier segments in the memory cache; None for the checkpoint's number.
        first_special_id: returns the id of the first token of every text; None where it is unknown.
        query_scale: factor of the queries; None for none. See `AttentionType.scales_queries`.
        asks_for_scale: whether the user chose the factor, and is warned where it is always 1.
        convertible: returns the model types whose attention can be replaced, for messages.
    """

    model: PreTrainedModel
    family: Family
    task: Task
    max_len: int
    recurrence: int | None = None
    query_scale: LogScale | None = None
    asks_for_scale: bool = False
    first_special_id: Callable[[], int | None] = lambda: None
    convertible: Callable[[], Sequence[str]] = lambda: ()

    def check_convertible(self, *, to: str) -> None:
        """Reject a model whose native attention cannot be replaced.

        Args:
            to: the requested attention, for the message.

        Raises:
            ModelError: the message has the reason, the hint the families whose attention can be replaced.
        """
        reason = self.family.conversion_unsupported_reason
        if reason is not None:
            raise ModelError(
                f"This {self.model.config.model_type} cannot be converted to {to} attention. {reason}",
                hint=(
                    "Leave out ",
                    Setting("attention"),
                    f". Model types that can be converted: {', '.join(self.convertible())}.",
                ),
            )

    def warn_if_unscaled(self, most_keys: int) -> None:
        """Warn if the query factor that the user chose is always 1.

        Args:
            most_keys: maximum number of keys that the query of a token that is not global attends to.
        """
        if self.asks_for_scale and self.query_scale is not None and not self.query_scale.changes(most_keys):
            logger.warning(
                "attention_scale='logn' changes no query that attends to at most %d tokens: the model was trained "
                "with %d.",
                most_keys,
                self.query_scale.base,
            )


@dataclass(frozen=True, kw_only=True)
class AttentionConversion:
    """An attention type fitted to one model, the result of `AttentionType.conversion`; types add fields.

    Attributes:
        is_native: whether the model was trained with this attention; otherwise it replaces dense attention.
        inputs: inputs of the graph in addition to the inputs of every model.
        padding: how far rows may be padded; None for any length.
        note: a sentence for the user; None for nothing.
        memory_cache: recurrent states of the converted model, whose specs are among `inputs`; None for none.
        record: the manifest's record; None where the type makes the record from the graph's nodes.
        query_scale: factor of the queries; None for none.
    """

    is_native: bool
    inputs: tuple[InputSpec, ...] = ()
    padding: PaddingRule | None = None
    note: str | None = None
    memory_cache: MemoryCache | None = None
    record: Any = None
    query_scale: LogScale | None = None

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        """Replace the attention of the model for tracing, in place; by default by the family's native attention."""
        assert family.native_attention is not None
        family.native_attention.adapt(model, self)

    def write(self, directory: Path) -> None:
        """Write the files of a bundle that `AttentionType.read` reads; most types have none."""


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Lengths, in tokens, at which the computation of an attention changes.

    Attributes:
        lengths: the lengths that a full verification checks.
        first: the smallest length at which the computation differs from that of short texts.
        second: a length at which no window is cut at the text's ends.
        alone: whether `first` is also checked in a batch of one.
    """

    lengths: frozenset[int]
    first: int
    second: int
    alone: bool = False


DISCRETE_OUTPUT = "hdexport.discrete."
"""Prefix of the names of outputs that hold a graph's discrete decisions."""


class DiscreteOutputs(Protocol):
    """Integers that a graph chooses by comparing numbers, such as a token's hash bucket in LSH attention.

    Where the numbers are nearly equal, rounding decides, and outputs differ although nothing is wrong. So PyTorch is
    given the graph's choices, and each choice is checked against the rounding error.
    """

    def watch(self, model: onnx_ir.Model) -> None:
        """Add the choices to a graph's outputs, in place: int64, with names that begin with `DISCRETE_OUTPUT`."""

    inlined: re.Pattern[str]
    """Names of the chosen values in a graph whose function bodies are inlined."""

    def follow(self, decisions: Sequence[IntArray], *, row: int, tokens: slice) -> AbstractContextManager[None]:
        """Give PyTorch's model the graph's choices for one text within the context.

        Args:
            decisions: the watched outputs of a batch, in order.
            row: row of the text in the batch.
            tokens: the row's tokens that PyTorch is given.
        """

    def take_wrong(self) -> list[str]:
        """Choices since the last call that rounding does not explain, one sentence each."""


@dataclass(frozen=True, kw_only=True)
class ReferenceProperties:
    """Properties of the PyTorch outputs that a bundle is compared with.

    Attributes:
        replaced: whether the attention differs from the attention of transformers' model.
        undefined_padding: whether outputs at padding are undefined, which dense attention defines.
        counts_from_padding: whether blocks are counted from the padding on the left.
        discrete_outputs: choices of the graph that rounding may change; None for none.
        information: lines about a text, ids [1, tokens], that say how good the attention is; no check.
        memory_cache: recurrent states of PyTorch's model, with the specs of the bundle's; None for none.
    """

    replaced: bool = False
    undefined_padding: bool = False
    counts_from_padding: bool = False
    discrete_outputs: DiscreteOutputs | None = None
    information: Callable[[torch.Tensor], Iterator[str]] | None = None
    memory_cache: MemoryCache | None = None


class AttentionRecord:
    """An attention in a manifest; each type has a frozen dataclass for it, whose first field is ``type``.

    Its members are what benchmarks and the memory estimates of a verification read.

    Attributes:
        holds_scores: whether the graph for a CPU holds all scores of a layer in memory where a text is masked.
        score_copies: arrays of a layer's scores that transformers' code holds at once.
    """

    holds_scores: ClassVar[bool] = True
    score_copies: ClassVar[int] = 0

    @property
    def baseline_note(self) -> str | None:
        """What the PyTorch model of a benchmark's baselines lacks of this attention; None if nothing."""
        return None

    def export_note(self, tokens: int) -> str | None:
        """Sizes that a plain export of PyTorch's model with a text of `tokens` tokens makes constants, if any."""
        return None

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        """Approximate keys per query in each layer of the portable graph, for a text of `tokens` tokens."""
        return []

    def reference_copies(self, heads: int, *, has_sdpa: bool) -> int:
        """Float32 arrays [tokens, tokens] that PyTorch holds at once for one row in a comparison."""
        return self.score_copies * heads


class AttentionType:
    """An attention type. The defaults are dense attention in standard operators, as the model has it.

    Importing a type's module must not import PyTorch: the command line asks every type.

    Attributes:
        name: the type's name, the value of ``type`` in its record.
        rank: place in the command's help and in manifests; equal ranks are in alphabetical order.
        syntaxes: first word of a value of ``--attention`` -> syntax; empty for types that models are not converted to.
        record_type: the dataclass of the type's record.
        scales_queries: whether a converted model multiplies its queries by `ConversionContext.query_scale`.
        lowerings: replacements of the nodes of the type's operators for backends that do not run the function bodies.
    """

    name: ClassVar[str]
    rank: ClassVar[int] = 9
    syntaxes: ClassVar[Mapping[str, CliSyntax]] = {}
    record_type: ClassVar[type[AttentionRecord]]
    scales_queries: ClassVar[bool] = False
    lowerings: ClassVar[Sequence[Lowering]] = ()

    def reads(self, spec: str) -> bool:
        """Whether a value of ``--attention`` has one of the type's syntaxes, by the value's first word."""
        return spec.partition(":")[0] in self.syntaxes

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Declare the type's options in addition to ``--attention``."""

    def request(self, spec: str | None, options: Mapping[str, Any]) -> Any | None:
        """Parse the options of the command into a request; None if they request nothing.

        Args:
            spec: value of ``--attention`` if the type `reads` it, otherwise None.
            options: the command's options; options that the type declared are None by default.

        Raises:
            InvalidSpecError: the value does not have the syntax of its first word.
            InputError: a number is out of its range, or parts contradict each other.
        """
        return None

    def conversion(self, request: Any | None, context: ConversionContext) -> AttentionConversion | None:
        """Fit the type to a model; None if the model has no such attention and none was requested.

        Raises:
            ModelError: the model cannot be converted.
            InputError: the request does not fit the model.
        """
        return None

    def record(self, conversion: AttentionConversion | None, nodes: Sequence[OperatorNode]) -> Any | None:
        """The manifest's record, an instance of `record_type`; None if the graph does not use the type.

        Args:
            conversion: the conversion that the graph was traced with.
            nodes: nodes of hdexport's operators in the portable graph, in the graph's order.
        """
        return None if conversion is None else conversion.record

    def problems(self, record: Any, manifest: Manifest) -> Iterator[str]:
        """Contradictions within a record or to the manifest; each begins with a key, such as ``.mode``."""
        yield from ()

    def read(self, record: Any, bundle: Bundle) -> AttentionConversion:
        """The conversion that a bundle was built with, for comparing it with PyTorch.

        Raises:
            BundleCorruptError: a file of the bundle is missing or damaged, or contradicts the manifest.
        """
        return AttentionConversion(is_native=True, record=record)

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """Give transformers' model the bundle's attention, in place, without hdexport's operators."""
        return ReferenceProperties()

    def boundaries(self, record: Any) -> Boundaries | None:
        """Lengths that a verification checks in addition to the lengths of every model, if any."""
        return None

    def masked_tokens_attend(self, nodes: Sequence[OperatorNode]) -> bool:
        """Whether masked tokens attend as in transformers in a graph with these nodes; otherwise their states are
        undefined."""
        return False

    def describe(self, record: Any) -> Iterator[tuple[str, str]]:
        """Lines of ``hdexport inspect``: a name, which may be empty, and a text."""
        yield from ()
