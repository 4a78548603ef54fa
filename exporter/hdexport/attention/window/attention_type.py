"""Windowed attention, as a kind: a model's own, or in place of dense attention."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hdexport.attention.attention_type import (
    NOT_TRAINED,
    AttentionConversion,
    AttentionType,
    Boundaries,
    CliSyntax,
    ConversionContext,
    OperatorNode,
    ReferenceProperties,
)
from hdexport.attention.spec import SpecReader
from hdexport.attention.window import Window, WindowAttention
from hdexport.attention.window.lower import LOWERING
from hdexport.model.family import Family
from hdexport.model.memory_cache import MASK, POSITION, MemoryCache, memory_input
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Manifest, Role, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, ModelError, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


_SYNTAX = CliSyntax(
    grammar="window:W[,right:R][,global:G][,dilation:D[/D...]]",
    example="window:256,global:1",
    summary="windows and global tokens",
    help="every query attends to W tokens on each side (Longformer's attention_window counts both sides: its 512 is "
    "W = 256), or to W before it and R after it, in steps of D tokens, one D for all heads or one per head; the first "
    "G tokens (default: 1) are global",
)

_NAMES = ("window", "right", "global", "dilation")

MOST_GLOBAL_TOKENS = 3840
"""Largest k of a TopK in an engine, by which the graph finds them."""

_DEFAULT_BOUND, _DEFAULT_BOUND_OF_QUESTIONS = 16, 64
"""Most tokens that a caller may mark; all tokens of a question are global."""


@dataclass(frozen=True, kw_only=True)
class WindowRequest:
    """The window that replaces dense attention, and the most global tokens that a caller may mark; None for the
    defaults.
    """

    window: Window | None = None
    max_global: int | None = None


@dataclass(frozen=True, kw_only=True)
class WindowConversion(AttentionConversion):
    """Windowed attention in a model; `window` is None where the model was trained with windows."""

    window: Window | None = None

    @property
    def bound(self) -> int:
        """The most global tokens that a caller may mark in a text; 0 where none can be marked."""
        return max((spec.bound or 0 for spec in self.inputs if spec.role is Role.GLOBAL_ATTENTION_MASK), default=0)

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        if self.window is None:
            super().adapt(model, family)
            return
        from hdexport.attention.model_parts import give_masks
        from hdexport.attention.window.model import recurrent_mask, window_mask

        window, memory_cache, query_scale = self.window, self.memory_cache, self.query_scale
        if memory_cache is not None:
            give_masks(model, lambda mask: recurrent_mask(window, mask, memory_cache))
        else:
            give_masks(model, lambda mask: window_mask(window, mask, query_scale))


class WindowAttentionType(AttentionType):
    """Windows around every token, with or without global tokens."""

    name = "window"
    rank = 1
    syntaxes = MappingProxyType({"window": _SYNTAX})
    record_type = WindowAttention
    lowerings = (LOWERING,)
    scales_queries = True

    def reads(self, spec: str) -> bool:
        """Whether a value is this kind's; its parts may come in any order."""
        return spec.partition(":")[0] in _NAMES

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument(
            "--max-global",
            metavar="N",
            type=int,
            help="Longformer and LED: maximum tokens of a text that global_attention_mask may mark (default: 16; 64 "
            "for question answering)",
        )

    def request(self, spec: str | None, options: Mapping[str, Any]) -> WindowRequest | None:
        window = None if spec is None else _window(spec)
        max_global = options.get("max_global")
        return None if window is None and max_global is None else WindowRequest(window=window, max_global=max_global)

    def conversion(self, request: WindowRequest | None, context: ConversionContext) -> WindowConversion | None:
        """Marks of a family whose callers mark tokens, or a window in place of dense attention."""
        request = request or WindowRequest()
        config = context.model.config
        if request.window is not None:
            context.check_convertible(to="windowed")
        if context.family.native_record(self.name, config) is not None:
            return WindowConversion(is_native=True, inputs=(_marks(context, request.max_global),))
        if request.max_global is not None:
            raise InputError(
                Setting("max_global", request.max_global),
                f" is for models with an input global_attention_mask, which {config.model_type} does not have.",
                hint="Leave it out.",
            )
        if request.window is None:
            return None
        _check(request.window, heads=config.num_attention_heads, max_len=context.max_len)
        context.warn_if_unscaled(request.window.most_keys)
        note = f"Attention is cut to windows of {request.window.describe()}, {NOT_TRAINED.format('windows')}"
        memory_cache = None
        if context.recurrence is not None:
            memory_cache = _memory_cache(request.window, context.recurrence, context)
            note += (
                f" In later segments of a document they reach up to {context.recurrence} tokens into the segments "
                f"before; a document has at most {context.max_len} tokens."
            )
        return WindowConversion(
            is_native=False,
            inputs=() if memory_cache is None else memory_cache.specs,
            window=request.window,
            note=note,
            memory_cache=memory_cache,
            query_scale=context.query_scale,
        )

    def record(self, conversion: AttentionConversion | None, nodes: Sequence[OperatorNode]) -> WindowAttention | None:
        """The windows of the nodes, which layers of transformers have, too."""
        sides = [
            (int(node.attributes["left"]), int(node.attributes["right"]))
            for node in nodes
            if node.operator == "SlidingWindowAttention"
        ]
        if not sides:
            return None
        layers = tuple(left for left, _ in sides)
        if isinstance(conversion, WindowConversion) and conversion.window is not None:
            return WindowAttention(layers=layers, converted=conversion.window)
        # A model's windows look back, or to both sides.
        is_causal = any(right != left for left, right in sides)
        return WindowAttention(layers=layers, right=0 if is_causal else None)

    def problems(self, record: WindowAttention, manifest: Manifest) -> Iterator[str]:
        """Dilations are one for all heads, or one for each."""
        window = record.converted
        if window is not None and len(window.dilation) not in (1, manifest.num_heads):
            yield f".converted.dilation has {len(window.dilation)} values for {manifest.num_heads} heads"

    def read(self, record: WindowAttention, bundle: Bundle) -> WindowConversion:
        manifest = bundle.manifest
        inputs = tuple(
            spec for spec in manifest.inputs if spec.role in (Role.GLOBAL_ATTENTION_MASK, Role.RECURRENT_STATE)
        )
        memory_cache = MemoryCache(manifest.recurrent_states) if manifest.recurrent_states else None
        return WindowConversion(
            is_native=record.converted is None, inputs=inputs, window=record.converted, memory_cache=memory_cache
        )

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """Masks in place of windows that the model was not trained with."""
        assert isinstance(conversion, WindowConversion)
        if conversion.window is not None:
            from hdexport.attention.window.model import use_window_masks

            use_window_masks(model, conversion.window, conversion.memory_cache)
        if conversion.memory_cache is not None:
            from hdexport.model.surgery import continue_positions

            continue_positions(model, family, conversion.memory_cache)
        # Longformer's own rows of padding are 0.
        return ReferenceProperties(
            replaced=conversion.window is not None,
            undefined_padding=not conversion.bound,
            memory_cache=conversion.memory_cache,
        )

    def boundaries(self, record: WindowAttention) -> Boundaries | None:
        """Boundaries where a text is no longer than a window reaches, and where windows are cut off on no side."""
        if not record.layers:
            return None
        sides = set(record.sides())
        lengths = {left + right + 1 for left, right in sides}
        lengths |= {side + step for both in sides for side in both for step in (0, 1, 2)}
        return Boundaries(
            lengths=frozenset(lengths - {0}),
            first=max(min(both) for both in sides) + 1,
            second=max(sum(both) for both in sides) + 2,
        )

    def masked_tokens_attend(self, nodes: Sequence[OperatorNode]) -> bool:
        """Masked tokens attend; with Longformer's own attention they give 0, there and here."""
        return True

    def describe(self, record: WindowAttention) -> Iterator[tuple[str, str]]:
        if record.layers:
            counts = Counter(record.sides())
            equal = all(left == right for left, right in counts)
            layers = ", ".join(
                f"{left if equal else f'{left} and {right}'} in {count} layers"
                for (left, right), count in counts.items()
            )
            yield "windows", f"tokens {'on each side' if equal else 'before and after'}: {layers}"
        if record.converted is not None:
            count, steps = record.converted.global_tokens, "/".join(map(str, record.converted.dilation))
            first = f"the first {count}" if count else "none"
            yield "", f"made from dense attention; global tokens: {first}; dilation {steps}"


ATTENTION_TYPE = WindowAttentionType()


def _memory_cache(window: Window, tokens: int, context: ConversionContext) -> MemoryCache:
    """The states that layers with such a window carry from segment to segment.

    An InputError says what in the model or its window is about a whole text.
    """
    from hdexport.attention.model_parts import attention_calls
    from hdexport.model.surgery import PositionsByLength

    config, family, recurrence = context.model.config, context.family, Setting("recurrence", tokens)
    if not family.learned_positions:
        raise InputError(
            recurrence,
            f" does not fit this {config.model_type}, which rotates keys by their positions in a segment before they "
            "are cached.",
            hint=(
                "Leave it out: without a table of positions, ",
                Setting("max_len"),
                " may be the length of a whole document.",
            ),
        )
    if window.global_tokens:
        raise InputError(
            recurrence,
            f" does not fit {window.global_tokens} global tokens: they are in a document's first segment, which later "
            "segments do not attend to.",
            hint=("Leave them out: ", Setting("attention", f"window:{window.tokens},right:{window.after},global:0")),
        )
    if context.task is Task.TEXT_CLASSIFICATION:
        raise InputError(
            recurrence,
            f" does not fit {context.task}: a {config.model_type} classifies by a text's first token, which does not "
            "attend to later segments.",
            hint=("Build for outputs of every token: ", Setting("task", Task.FEATURE_EXTRACTION)),
        )
    if isinstance(family.embeddings(context.model).position_embeddings, PositionsByLength):
        raise InputError(
            recurrence,
            " does not fit ",
            Setting("scheme"),
            " interpolate and group, which spread positions over the length of a text: a segment does not have the "
            "document's length.",
            hint=("Use ", Setting("scheme"), " hierarchical, tile or none."),
        )
    if context.query_scale is not None and context.query_scale.changes(window.most_keys):
        raise InputError(
            recurrence,
            " does not fit ",
            Setting("attention_scale", "logn"),
            ", which counts the tokens of a whole text.",
            hint=("Use ", Setting("attention_scale", "none"), "."),
        )
    reach = window.tokens * max(window.dilation)
    if tokens > reach:
        logger.warning(
            "Windows reach %d tokens back, and %d are cached: %s has the same outputs.",
            reach,
            tokens,
            Setting("recurrence", max(2, reach)),
        )
    # Of each call of an attention, keys and values in all heads.
    layers = range(len(attention_calls(context.model)))
    states = (memory_input(layer, "memory", 2 * int(config.hidden_size), bound=tokens) for layer in layers)
    position = memory_input(POSITION, 1, bound=context.max_len)
    return MemoryCache((*states, memory_input(MASK, "memory", bound=tokens), position))


def _marks(context: ConversionContext, max_global: int | None) -> InputSpec:
    """The input ``global_attention_mask``, with 1 for global tokens.

    Without a mask from the caller, tokens are global as in transformers' classes: the question in question answering,
    the first token in classification of texts, and else none.
    """
    if max_global is not None and not 1 <= max_global <= MOST_GLOBAL_TOKENS:
        raise InputError(parameter="max_global", value=max_global, accepted=f"1 to {MOST_GLOBAL_TOKENS}")
    config, is_first = context.model.config, context.task is Task.TEXT_CLASSIFICATION
    default, bound = Default(fill=Fill.FIRST_TOKEN if is_first else Fill.ZEROS), _DEFAULT_BOUND
    if context.task is Task.QUESTION_ANSWERING:
        if config.sep_token_id is None:
            raise ModelError(
                "config.json has no sep_token_id, so where a question ends is unknown.",
                hint='Add it: the id of the token after the question, e.g. "sep_token_id": 2.',
            )
        default, bound = Default(fill=Fill.UNTIL_TOKEN, token_id=int(config.sep_token_id)), _DEFAULT_BOUND_OF_QUESTIONS
    return InputSpec(
        name="global_attention_mask",
        dtype="int64",
        shape=("batch", "tokens"),
        role=Role.GLOBAL_ATTENTION_MASK,
        default=default,
        # More rows than the longest text has tokens are more than an engine overwrites.
        bound=min(max_global or bound, context.max_len),
    )


def _window(spec: str) -> Window:
    reader = SpecReader(spec, spec, names=_NAMES, sign=":", example=_SYNTAX.example)
    steps = reader.values.get("dilation", "1").split("/")
    return Window(
        tokens=reader.number("window", reader.required("window"), minimum=1),
        right=reader.optional("right", minimum=0),
        global_tokens=reader.number("global", reader.values.get("global", "1"), minimum=0, maximum=MOST_GLOBAL_TOKENS),
        dilation=tuple(reader.number("dilation", step, minimum=1) for step in steps),
    )


def _check(window: Window, *, heads: int, max_len: int) -> None:
    """Reject dilations that do not fit the heads, and warn of a window that changes nothing."""
    if len(window.dilation) not in (1, heads):
        raise InputError(
            Setting("attention"),
            f" has {len(window.dilation)} dilations, and the model has {heads} heads in each layer.",
            hint=f"Give one for all heads, dilation:2, or {heads}, separated by slashes.",
        )
    # However wide the window, a dilated head does not see all of a text.
    if max(window.dilation) == 1 and min(window.tokens, window.after) >= max_len - 1:
        logger.warning(
            "A window of %s covers every text of up to %d tokens: the attention is dense.", window.describe(), max_len
        )
