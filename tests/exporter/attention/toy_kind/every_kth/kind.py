"""What hdexport asks of a kind of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hdexport.attention.kind import NOT_TRAINED, AttentionKind, AttentionRecord, Boundaries, Form, ReferenceFacts, Setup
from hdexport.attention.spec import SpecReader

_FORM = Form(
    grammar="every:k=K",
    example="every:k=2",
    summary="tokens at regular distances",
    help="every query sees the tokens that are a multiple of K away from it",
)


@dataclass(frozen=True, kw_only=True)
class EveryKth(AttentionRecord):
    """The record in the manifest."""

    kind: Literal["every_kth"] = "every_kth"
    step: int
    layers: int

    @property
    def peer_remark(self):
        return "knows no steps: its attention is dense"

    def keys_of_layers(self, manifest, tokens):
        return [tokens] * self.layers


@dataclass(frozen=True, kw_only=True)
class EveryKthSetup(Setup):
    """The attention in a model."""

    step: int
    layers: int

    def adapt(self, model, family):
        from every_kth.masks import StepMask
        from hdexport.attention.model_parts import wrap_layers

        wrap_layers(model, lambda states, mask, layers: layers(states, StepMask(self.step, mask)))


class EveryKthKind(AttentionKind):
    """Registered as an entry point of the group hdexport.attention, beside this folder."""

    name = "every_kth"
    forms = {"every": _FORM}  # noqa: RUF012 - as a user would write it
    record_type = EveryKth

    def request(self, spec, options):
        if spec is None:
            return None
        reader = SpecReader(spec, spec.partition(":")[2], names=("k",), sign="=", example=_FORM.example)
        return reader.number("k", reader.required("k"), least=1)

    def setup(self, request, subject):
        if request is None:
            return None
        subject.check_convertible(to="strided")
        remark = f"Attention is cut to every {request}. token, {NOT_TRAINED.format('steps')}"
        layers = subject.model.config.num_hidden_layers
        return EveryKthSetup(is_own=False, remark=remark, step=request, layers=layers)

    def record(self, setup, nodes):
        return EveryKth(step=setup.step, layers=setup.layers) if isinstance(setup, EveryKthSetup) else None

    def problems(self, record, manifest):
        if record.step < 1:
            yield f".step is {record.step}, and a step is 1 or more"

    def read(self, record, bundle):
        return EveryKthSetup(is_own=False, step=record.step, layers=record.layers)

    def use_reference(self, setup, model, family):
        from every_kth.masks import StepCounts
        from hdexport.attention.model_parts import wrap_layers
        from hdexport.attention.reference_attention import use_pair_counts

        use_pair_counts(model)
        wrap_layers(model, lambda states, mask, layers: layers(states, StepCounts(setup.step, mask.bool())))
        return ReferenceFacts(replaced=True, undefined_padding=True)

    def boundaries(self, record):
        step = record.step
        return Boundaries(lengths=frozenset({step, step + 1, 2 * step + 1}), first=step + 1, second=2 * step + 1)

    def describe(self, record):
        yield "steps", f"every query sees every {record.step}. token, in {record.layers} layers"
