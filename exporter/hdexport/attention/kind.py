"""A kind of attention, as the exporter knows it: one class per kind, each in its own folder.

``hdexport build MODEL --attention window:256`` takes this way:

1. `hdexport.attention.kinds.attention_from_spec` asks the kinds which of them reads the value. `AttentionKind.request`
   makes a `WindowRequest`, which `BuildOptions.attention` carries under the kind's name.
2. The pipeline loads the model. `AttentionKind.setup` fits the request to the model, or refuses: a `WindowSetup`.
3. `Setup.adapt` puts nodes of our operator into the model's layers, and the model is traced.
4. `AttentionKind.record` describes the setup for the manifest; each node gets the operator's function body
   (`hdplugins.attention`), and `hdexport.graph.targets` asks the node's `Lowering` for each backend's form.
5. Verification knows the bundle alone: `AttentionKind.read` makes a setup of the record, `use_reference` makes the
   library's own model attend so, and `boundaries` adds the lengths at which windows begin to matter.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hdexport.lowering.lowering import Lowering
from hdexport.model.carried_states import CallStates
from hdexport.model.family import Family
from hdruntime.bundle.manifest import InputSpec, Manifest, PaddingRule, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    import re

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
"""The remark on a model whose attention is replaced; {} is its replacement, "windows"."""

DENSE_PEER = "does not use {}: its attention is dense, and its answers are those of the model before --attention"
"""The remark on a peer's model, which has no such attention; {} is the attention, "windows"."""


@dataclass(frozen=True)
class OperatorNode:
    """A node of one of our operators: its name, and its attributes."""

    operator: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of ``--attention``'s value, by which a kind takes the place of dense attention.

    Attributes:
        grammar: the form, ``window:W[,right:R]``.
        example: a value.
        summary: its name, in few words.
        help: the meaning of each part of the value, a sentence for the command's help.
    """

    grammar: str
    example: str
    summary: str
    help: str


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that a kind is set up for.

    Attributes:
        model: with `max_len` positions, in float32.
        family: of the model.
        task: of the bundle.
        max_len: the longest input, in tokens.
        recurrence: tokens of earlier calls that the model is asked to remember; None for the checkpoint's number.
        first_special_id: the id that a text begins with; None where it is unknown.
        query_scale: factor of the queries; None for none. See `AttentionKind.scales_queries`.
        asks_for_scale: whether the user asked for it, and is to be told where it is always 1.
        convertible: model types of the families whose attention can be exchanged, for messages.
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
        """Refuse a model whose attention cannot be exchanged.

        Args:
            to: the attention that it was to get, for the message.

        Raises:
            ModelError: the message says why not, and for which families attention can be exchanged.
        """
        if self.family.why_not_converted is not None:
            raise ModelError(
                f"{self.model.config.model_type} cannot be given {to} attention: {self.family.why_not_converted}.",
                hint=f"Leave out --attention. Families that can: {', '.join(self.convertible())}.",
            )

    def warn_if_unscaled(self, most_keys: int) -> None:
        """Warn where the factor that the user asked for is always 1.

        Args:
            most_keys: that a query sees, unless it is a global token's.
        """
        if self.asks_for_scale and self.query_scale is not None and not self.query_scale.changes(most_keys):
            logger.warning(
                "--attention-scale logn leaves queries as they are that see %d tokens at most: the model was trained "
                "with %d.",
                most_keys,
                self.query_scale.base,
            )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A kind's attention in one model: the result of `AttentionKind.setup`. Kinds add the fields that they need.

    Attributes:
        is_own: whether the model was trained with it; else it takes the place of dense attention.
        inputs: of the graph, in addition to every model's inputs.
        padding: how far rows may be padded; None for any length.
        remark: to the user; None for nothing.
        carried: states of the adapted model; their specs are among the inputs. None where it carries none.
        record: the manifest's record of it; None where the kind makes the record of the graph's nodes.
        query_scale: factor of the queries; None for none.
    """

    is_own: bool
    inputs: tuple[InputSpec, ...] = ()
    padding: PaddingRule | None = None
    remark: str | None = None
    carried: CallStates | None = None
    record: Any = None
    query_scale: LogScale | None = None

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        """Make the model attend so while it is traced, in place; by default as the family's own attention does."""
        assert family.own is not None
        family.own.adapt(model, self)

    def write(self, directory: Path) -> None:
        """Write the files of a bundle that `AttentionKind.read` reads; most kinds have none."""


@dataclass(frozen=True, kw_only=True)
class Boundaries:
    """Lengths, in tokens, at which something changes in an attention.

    Attributes:
        lengths: the lengths that a full verification visits.
        first: the first length at which it is not as for short texts.
        second: one at which nothing is cut off any more.
        alone: whether `first` is also to be checked in a batch of its own.
    """

    lengths: frozenset[int]
    first: int
    second: int
    alone: bool = False


DECISION = "hdexport.decision."
"""Beginning of the names of outputs that hold a graph's decisions."""


class Decisions(Protocol):
    """Decisions that a graph makes by comparing numbers, such as the hash of a token between two buckets.

    Where the numbers are nearly equal, rounding decides, and answers differ although nothing is wrong. So PyTorch is
    made to decide as the graph did, and every decision is checked to be one that rounding allows.
    """

    def watch(self, model: onnx_ir.Model) -> None:
        """Make a graph give its decisions, in place, as further outputs, int64, whose names begin with `DECISION`."""

    inlined: re.Pattern[str]
    """Names of the values that decide, in a graph whose bodies are inlined."""

    def follow(self, decisions: Sequence[IntArray], *, row: int, tokens: slice) -> AbstractContextManager[None]:
        """While this holds, PyTorch's model decides about one text as the graph did.

        Args:
            decisions: the watched outputs, in order, of a batch.
            row: of the text in the batch.
            tokens: the row's tokens that PyTorch is given.
        """

    def take_wrong(self) -> list[str]:
        """Decisions that rounding does not explain, a sentence each, since the last call."""


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts:
    """Properties of the PyTorch answers that a bundle is compared with.

    Attributes:
        replaced: the attention is another than the library's own.
        undefined_padding: outputs at padding are undefined, where dense attention defines them.
        counts_from_padding: the attention counts its blocks from the padding on the left.
        decisions: that a graph makes and rounding may turn; None where there are none.
        information: lines about a text, [1, tokens] ids, that say how good the attention is; no check.
        carried: states that PyTorch's model looks at, of the same specs as the bundle's; None where it carries none.
    """

    replaced: bool = False
    undefined_padding: bool = False
    counts_from_padding: bool = False
    decisions: Decisions | None = None
    information: Callable[[torch.Tensor], Iterator[str]] | None = None
    carried: CallStates | None = None


class AttentionRecord:
    """An attention in a manifest: a kind has a frozen dataclass of it, whose first field is ``kind``.

    What a benchmark and the memory check of a verification ask about it is here.

    Attributes:
        holds_scores: whether the graph for a CPU has all scores of a layer in memory where a text is masked.
        score_copies: arrays of a layer's scores that PyTorch's own code holds at once.
    """

    holds_scores: ClassVar[bool] = True
    score_copies: ClassVar[int] = 0

    @property
    def peer_remark(self) -> str | None:
        """The parts that the PyTorch model of a benchmark's peers lacks of it; None if it lacks nothing."""
        return None

    def export_remark(self, tokens: int) -> str | None:
        """Sizes that an export of PyTorch's model with a text of that many tokens freezes, if any."""
        return None

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        """About how many keys a query meets in each layer of the portable graph, in a text of that many tokens."""
        return []

    def reference_copies(self, family: Family, heads: int) -> int:
        """Arrays [tokens, tokens] of float32 that PyTorch's side of a comparison takes at once, for one row."""
        return self.score_copies * heads


class AttentionKind:
    """A kind of attention; a subclass answers where it differs from "dense, in standard operators, of the model's own".

    Nothing here imports PyTorch before a model is loaded.

    Attributes:
        name: the tag of its record in the manifest.
        rank: place among the kinds of hdexport in the command's help and in manifests; equal ones are in alphabetical
            order.
        forms: word that begins a value of ``--attention`` -> form; none for a kind that no model is given.
        record_type: the dataclass of its record.
        scales_queries: whether models that are given it scale their queries by `Subject.query_scale`.
        lowerings: what backends get in the place of the nodes of the kind's operators, where not the bodies alone.
    """

    name: ClassVar[str]
    rank: ClassVar[int] = 9
    forms: ClassVar[Mapping[str, Form]] = {}
    record_type: ClassVar[type[AttentionRecord]]
    scales_queries: ClassVar[bool] = False
    lowerings: ClassVar[Sequence[Lowering]] = ()

    def reads(self, spec: str) -> bool:
        """Whether a value of ``--attention`` is of one of its forms, judged by its beginning."""
        return spec.partition(":")[0] in self.forms

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Declare its options in addition to ``--attention``."""

    def request(self, spec: str | None, options: Mapping[str, Any]) -> Any | None:
        """The request; None for nothing.

        Args:
            spec: value of ``--attention``, if the kind reads it.
            options: the command's options; options that the kind declared are None where they were not given.

        Raises:
            NotUnderstoodError: the value is not of the form that it begins like.
            InputError: a number is out of its range, or parts contradict each other.
        """
        return None

    def setup(self, request: Any | None, subject: Subject) -> Setup | None:
        """The kind's attention in a model; None where it has none and none was requested.

        Raises:
            ModelError: the model cannot be given it.
            InputError: the request does not fit the model.
        """
        return None

    def record(self, setup: Setup | None, nodes: Sequence[OperatorNode]) -> Any | None:
        """The manifest's record of it: an instance of `record_type`; None if the graph does not use it.

        Args:
            setup: the setup that the graph was traced with.
            nodes: of our operators in the portable graph, in its order.
        """
        return None if setup is None else setup.record

    def problems(self, record: Any, manifest: Manifest) -> Iterator[str]:
        """Contradictions within a record, or to the manifest; each begins with a key, ``.mode``."""
        yield from ()

    def read(self, record: Any, bundle: Bundle) -> Setup:
        """The setup of a bundle, for comparing it with PyTorch.

        Raises:
            BundleCorruptError: a file that it needs is missing or damaged, or contradicts the manifest.
        """
        return Setup(is_own=True, record=record)

    def use_reference(self, setup: Setup, model: PreTrainedModel, family: Family) -> ReferenceFacts:
        """Make the library's own model the bundle's reference, in place, with nothing of our operators."""
        return ReferenceFacts()

    def boundaries(self, record: Any) -> Boundaries | None:
        """Lengths that a verification must visit beyond every model's, if any."""
        return None

    def masked_tokens_attend(self, nodes: Sequence[OperatorNode]) -> bool:
        """Whether masked tokens attend as in the library, in a graph with these nodes.

        Else their states are undefined.
        """
        return False

    def describe(self, record: Any) -> Iterator[tuple[str, str]]:
        """Lines of ``hdexport inspect``: a name, which may be empty, and the text."""
        yield from ()
