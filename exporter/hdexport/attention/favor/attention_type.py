"""FAVOR+, as a kind: a Performer's own, or in place of dense attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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
    ReferenceProperties,
)
from hdexport.attention.favor import FavorAttention
from hdexport.attention.spec import InvalidSpecError, SpecReader
from hdexport.model.family import Family
from hdruntime.bundle.manifest import Manifest, PaddingRule
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class FavorConversion(AttentionConversion):
    """FAVOR+ in a model."""

    record: FavorAttention

    def projection(self, model: PreTrainedModel) -> torch.Tensor:
        """[features, head_dim], float32, one for all layers, of a model that was converted."""
        from hdplugins.attention.favor.reference import draw_projection

        assert self.record.seed is not None
        config = model.config
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return draw_projection(self.record.seed, features=self.record.features, head_dim=head_dim)

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        if self.is_native:
            super().adapt(model, family)
            return
        from hdexport.attention.favor.model import FavorMask
        from hdexport.attention.model_parts import give_masks

        # A buffer, so that it is an initializer of the graph, and after the model was cast: it stays in float32.
        model.register_buffer("favor_projection", self.projection(model), persistent=False)
        record, query_scale = self.record, self.query_scale

        def made(mask: torch.Tensor) -> FavorMask:
            factors = None if query_scale is None else query_scale.for_mask(mask)
            return FavorMask(record, mask, model.get_buffer("favor_projection"), factors)

        give_masks(model, made)


_SYNTAX = CliSyntax(
    grammar="favor[:features=M,seed=S,compat]",
    example="favor:features=256",
    summary="random features, experimental",
    help="experimental: FAVOR+, the attention of Performers. Products of M positive random features (default: 256) of "
    "queries and keys estimate softmax attention, linear in tokens; S is their seed (default: 0). With compat, padding "
    "counts as keys whose values are 0, as in performer-pytorch; a Performer checkpoint takes this part only",
)

_COMPAT = "compat"

_RANGES = {"features": (1, 2**14), "seed": (0, 2**31 - 1)}

_DEFAULT_FEATURES, _DEFAULT_SEED = 256, 0

_EPSILON = 1e-6
"""Epsilon of converted models. The authors' 1e-4, which Performers were trained with, makes weights more alike: for a
model of 64 positions and texts of 600, 1024 features are off by 30 % with 1e-4 and by 20 % with 1e-6."""


class FavorAttentionType(AttentionType):
    """Random features, whose products estimate the weights of a softmax."""

    name = "favor"
    rank = 4
    syntaxes = MappingProxyType({"favor": _SYNTAX})
    record_type = FavorAttention
    scales_queries = True

    def request(self, spec: str | None, options: Mapping[str, Any]) -> dict[str, int] | None:
        """The numbers of the form that were given, and ``compat``, 1, if it was."""
        return None if spec is None else _request(spec)

    def conversion(self, request: Mapping[str, int] | None, context: ConversionContext) -> FavorConversion | None:
        """A Performer's own; or features in place of dense attention."""
        config = context.model.config
        own: FavorAttention | None = context.family.native_record(self.name, config)
        if own is not None:
            if request and request.keys() & _RANGES.keys():
                raise InputError(
                    f"The checkpoint of a {config.model_type} has its features; ",
                    Setting("attention", "favor"),
                    " accepts compat for this model.",
                    hint=("For example: ", Setting("attention", "favor:compat")),
                )
            return _conversion(dataclasses.replace(own, compat=bool(request and _COMPAT in request)), is_native=True)
        if request is None:
            return None
        context.check_convertible(to="FAVOR+")
        record = FavorAttention(
            layers=int(config.num_hidden_layers),
            features=request.get("features", _DEFAULT_FEATURES),
            seed=request.get("seed", _DEFAULT_SEED),
            epsilon=_EPSILON,
            compat=_COMPAT in request,
        )
        note = (
            f"Experimental: {record.features} random features of queries and keys estimate softmax attention, "
            f"{NOT_TRAINED.format('features')}"
        )
        return dataclasses.replace(_conversion(record, is_native=False), note=note, query_scale=context.query_scale)

    def problems(self, record: FavorAttention, manifest: Manifest) -> Iterator[str]:
        """No feature is below a number that is not above 0."""
        if not 0 < record.epsilon < 1:
            yield f".epsilon is {record.epsilon}, which is not between 0 and 1"

    def read(self, record: FavorAttention, bundle: Bundle) -> FavorConversion:
        return _conversion(record, is_native=not record.converted)

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """FAVOR+ of plain PyTorch in the place of dense attention; a Performer's module has it."""
        from hdexport.attention.favor.model import use_features

        assert isinstance(conversion, FavorConversion)
        if conversion.is_native:
            model.base_model.compat = conversion.record.compat
            return ReferenceProperties()
        attention = use_features(model, conversion.projection(model), conversion.record)
        return ReferenceProperties(replaced=True, information=lambda ids: attention.estimate_error(model, ids))

    def boundaries(self, record: FavorAttention) -> Boundaries:
        """Around the chunks in which a CPU computes."""
        from hdplugins.attention.favor.onnx_functions import CHUNK_TOKENS

        lengths = {CHUNK_TOKENS * count + step for count in (1, 2) for step in (-1, 0, 1)}
        return Boundaries(lengths=frozenset(lengths), first=CHUNK_TOKENS + 1, second=2 * CHUNK_TOKENS + 1)

    def describe(self, record: FavorAttention) -> Iterator[tuple[str, str]]:
        drawn = "of the checkpoint" if record.seed is None else f"drawn with seed {record.seed}"
        yield "FAVOR+ attention", f"{record.layers} layers; {record.features} features, {drawn}"
        if record.compat:
            yield "", "padding counts as keys whose values are 0, so rows of other lengths are not padded"
        if record.converted:
            yield "", "experimental: made from dense attention"


ATTENTION_TYPE = FavorAttentionType()


def _request(spec: str) -> dict[str, int]:
    _, colon, text = spec.partition(":")
    parts = text.split(",") if colon else []
    compat = _COMPAT in parts
    if compat:
        parts.remove(_COMPAT)
    if _COMPAT in parts:
        raise InvalidSpecError(_COMPAT)
    listed = ",".join(parts) if parts else None
    reader = SpecReader(spec, listed, names=tuple(_RANGES), sign="=", example=_SYNTAX.example)
    return reader.numbers(_RANGES) | ({_COMPAT: 1} if compat else {})


def _conversion(record: FavorAttention, *, is_native: bool) -> FavorConversion:
    padding = PaddingRule(multiple_of=1) if record.compat else None
    return FavorConversion(is_native=is_native, record=record, padding=padding)
