"""The toy's `AttentionType`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hdexport.attention.attention_type import (
    NOT_TRAINED,
    AttentionConversion,
    AttentionRecord,
    AttentionType,
    Boundaries,
    CliSyntax,
    ReferenceProperties,
)
from hdexport.attention.spec import SpecReader

_SYNTAX = CliSyntax(
    grammar="every:k=K",
    example="every:k=2",
    summary="tokens at regular distances",
    help="every query sees the tokens that are a multiple of K away from it",
)


@dataclass(frozen=True, kw_only=True)
class EveryKth(AttentionRecord):
    """The record in the manifest."""

    type: Literal["every_kth"] = "every_kth"
    step: int
    layers: int

    @property
    def baseline_note(self):
        return "knows no steps: its attention is dense"

    def keys_of_layers(self, manifest, tokens):
        return [tokens] * self.layers


@dataclass(frozen=True, kw_only=True)
class EveryKthConversion(AttentionConversion):
    """The attention in a model."""

    step: int
    layers: int

    def adapt(self, model, family):
        from hdexport.attention.every_kth.masks import StepMask

        from hdexport.attention.model_parts import wrap_layers

        wrap_layers(model, lambda states, mask, layers: layers(states, StepMask(self.step, mask)))


class EveryKthAttentionType(AttentionType):
    """Attention to every k-th token."""

    name = "every_kth"
    syntaxes = {"every": _SYNTAX}  # noqa: RUF012 - as a user would write it
    record_type = EveryKth

    def request(self, spec, options):
        if spec is None:
            return None
        reader = SpecReader(spec, spec.partition(":")[2], names=("k",), sign="=", example=_SYNTAX.example)
        return reader.number("k", reader.required("k"), minimum=1)

    def conversion(self, request, context):
        if request is None:
            return None
        context.check_convertible(to="strided")
        note = f"Attention is cut to every {request}. token, {NOT_TRAINED.format('steps')}"
        layers = context.model.config.num_hidden_layers
        return EveryKthConversion(is_native=False, note=note, step=request, layers=layers)

    def record(self, conversion, nodes):
        return (
            EveryKth(step=conversion.step, layers=conversion.layers)
            if isinstance(conversion, EveryKthConversion)
            else None
        )

    def problems(self, record, manifest):
        if record.step < 1:
            yield f".step is {record.step}, and a step is 1 or more"

    def read(self, record, bundle):
        return EveryKthConversion(is_native=False, step=record.step, layers=record.layers)

    def use_reference(self, conversion, model, family):
        from hdexport.attention.every_kth.masks import StepCounts

        from hdexport.attention.model_parts import wrap_layers
        from hdexport.attention.reference_attention import use_pair_counts

        use_pair_counts(model)
        wrap_layers(model, lambda states, mask, layers: layers(states, StepCounts(conversion.step, mask.bool())))
        return ReferenceProperties(replaced=True, undefined_padding=True)

    def boundaries(self, record):
        step = record.step
        return Boundaries(lengths=frozenset({step, step + 1, 2 * step + 1}), first=step + 1, second=2 * step + 1)

    def describe(self, record):
        yield "steps", f"every query sees every {record.step}. token, in {record.layers} layers"


ATTENTION_TYPE = EveryKthAttentionType()
