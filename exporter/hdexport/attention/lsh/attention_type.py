"""LSH attention, as a kind: a Reformer's own, or in place of dense attention."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
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
from hdexport.attention.lsh import Chunks, Hashes, LayerType, LshAttention
from hdexport.attention.spec import SpecReader
from hdexport.model.family import Family
from hdruntime.bundle.manifest import Dtype, Manifest, PaddingRule
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def buckets_for(tokens: int, *, chunk: int, positions: int) -> tuple[int, ...]:
    """The buckets that Hugging Face's Reformer takes where its ``num_buckets`` is None and a text is the first.

    Twice as many as the chunks of the text's `tokens`, padding included, rounded down to a power of two, and in two
    factors where they are many for a model of so many `positions`.
    """
    power = max(1, (2 * (tokens // chunk)).bit_length() - 1)
    if 2**power > 2 * max(math.isqrt(positions // chunk), chunk):
        return 2 ** (power // 2), 2 ** (power - power // 2)
    return (2**power,)


@dataclass(frozen=True, kw_only=True)
class LshConversion(AttentionConversion):
    """LSH attention in a model, for a bundle of that dtype."""

    record: LshAttention
    dtype: Dtype = "float32"

    def rotations(self, model: PreTrainedModel) -> torch.Tensor | None:
        """[heads, head_dim, rounds, directions], float32, one for all layers; None without hashes."""
        from hdplugins.attention.lsh.reference import draw_rotations

        hashes, config = self.record.hashes, model.config
        if hashes is None:
            return None
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "attention_head_size", config.hidden_size // heads))
        return draw_rotations(hashes.seed, heads=heads, head_dim=head_dim, buckets=hashes.buckets, rounds=hashes.rounds)

    def adapt(self, model: PreTrainedModel, family: Family) -> None:
        if self.is_native:
            super().adapt(model, family)
            return
        from hdexport.attention.lsh.model import LshMask
        from hdexport.attention.model_parts import give_masks

        # A buffer, so that it is an initializer of the graph, and after the model was cast: it stays in float32.
        model.register_buffer("lsh_rotations", self.rotations(model), persistent=False)
        record = self.record
        give_masks(model, lambda mask: LshMask(record, mask.int(), model.get_buffer("lsh_rotations")))


_SYNTAX = CliSyntax(
    grammar="lsh[:chunk=C,rounds=R,buckets=B[/B...],before=N,after=N,seed=S]",
    example="lsh:chunk=64,rounds=4",
    summary="hashes, experimental",
    help="experimental: Reformer's attention. Tokens are sorted by hashes of their queries, which are their keys as "
    "well, in R rounds (default: 4) of B buckets; a query sees its chunk of C tokens (default: 64), N chunks before it "
    "(default: 1) and N after it (default: 0). A Reformer checkpoint takes rounds, buckets and seed",
)

_RANGES = {"chunk": (1, 2**15), "rounds": (1, 64), "before": (0, 64), "after": (0, 64), "seed": (0, 2**31 - 1)}

_MOST_FACTOR = 2**12
"""The largest factor of the number of buckets."""

_DEFAULT_CHUNK, _DEFAULT_ROUNDS, _DEFAULT_SEED = 64, 4, 0


class LshAttentionType(AttentionType):
    """Chunks of tokens sorted by their hashes, and chunks of tokens as they come."""

    name = "lsh"
    rank = 3
    syntaxes = MappingProxyType({"lsh": _SYNTAX})
    record_type = LshAttention

    def request(self, spec: str | None, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """The numbers of the form that were given, and ``buckets``, a tuple."""
        return None if spec is None else _request(spec)

    def conversion(self, request: Mapping[str, Any] | None, context: ConversionContext) -> LshConversion | None:
        """A Reformer's own, its hashes frozen; or hashes in place of dense attention."""
        config, max_len = context.model.config, context.max_len
        own: LshAttention | None = context.family.native_record(self.name, config)
        if own is None and request is None:
            return None
        if own is None:
            assert request is not None
            context.check_convertible(to="LSH")
            record = _converted(request, layers=config.num_hidden_layers, max_len=max_len)
            note = f"Experimental: attention is among tokens of alike hashes, {NOT_TRAINED.format('hashes')}"
            _warn_if_dense(record, max_len)
            return LshConversion(is_native=False, record=record, note=note)
        record, frozen = _frozen(own, request or {}, config, max_len)
        _warn_if_dense(record, max_len)
        return dataclasses.replace(_own(record), note=frozen)

    def problems(self, record: LshAttention, manifest: Manifest) -> Iterator[str]:
        """Layers need their parts, and chunks are whole."""
        for layer, parts in (("lsh", (record.hashes, record.hashed)), ("local", (record.local,))):
            if layer in record.layers and None in parts:
                yield f".layers has layers {layer}, and their record is missing"
        for chunks in (record.hashed, record.local):
            if chunks is not None and record.multiple % chunks.tokens:
                yield f".multiple {record.multiple} is no multiple of a chunk's {chunks.tokens} tokens"
        if record.hashes is not None and any(factor % 2 for factor in record.hashes.buckets):
            yield ".hashes.buckets has an odd number"

    def read(self, record: LshAttention, bundle: Bundle) -> LshConversion:
        conversion = LshConversion(is_native=False, record=record) if record.converted else _own(record)
        return dataclasses.replace(conversion, dtype=bundle.manifest.dtype)

    def use_reference(
        self, conversion: AttentionConversion, model: PreTrainedModel, family: Family
    ) -> ReferenceProperties:
        """Transformers' Reformer, or its attention in place of dense one."""
        from hdexport.attention.lsh.model import recall, use_hashes, use_own_hashes

        assert isinstance(conversion, LshConversion)
        record, rotations = conversion.record, conversion.rotations(model)
        if conversion.is_native:
            hashes = None if rotations is None else use_own_hashes(model, record, rotations, conversion.dtype)
            return ReferenceProperties(undefined_padding=True, counts_from_padding=True, discrete_outputs=hashes)
        assert rotations is not None, "a converted model hashes"
        return ReferenceProperties(
            replaced=True,
            undefined_padding=True,
            discrete_outputs=use_hashes(model, record, rotations, conversion.dtype),
            information=lambda ids: recall(model, record, rotations, ids),
        )

    def boundaries(self, record: LshAttention) -> Boundaries:
        """Around a chunk, where texts stop to be attended to densely, and around whole chunks."""
        sizes = {chunks.tokens for chunks in (record.hashed, record.local) if chunks is not None} | {record.multiple}
        lengths = {size * count + step for size in sizes for count in (1, 2) for step in (-1, 0, 1)} - {0}
        return Boundaries(lengths=frozenset(lengths), first=min(sizes) + 1, second=3 * record.multiple + 1, alone=True)

    def describe(self, record: LshAttention) -> Iterator[tuple[str, str]]:
        counts = ", ".join(f"{count} {layer}" for layer, count in Counter(record.layers).items())
        yield "lsh attention", f"layers: {counts}; texts are padded to a multiple of {record.multiple} tokens"
        if record.hashes is not None and record.hashed is not None:
            buckets = " x ".join(map(str, record.hashes.buckets))
            yield "", f"{record.hashes.rounds} rounds of {buckets} buckets, drawn with seed {record.hashes.seed}"
            yield "", f"hashed: {_chunks_text(record.hashed)}"
        if record.local is not None:
            yield "", f"local: {_chunks_text(record.local)}"
        if record.causal:
            yield "", "causal: tokens see earlier ones only"
        if record.converted:
            yield "", "experimental: made from dense attention"


ATTENTION_TYPE = LshAttentionType()


def _chunks_text(chunks: Chunks) -> str:
    return f"chunks of {chunks.tokens} tokens, with {chunks.before} before and {chunks.after} after"


def _request(spec: str) -> dict[str, Any]:
    _, colon, parts = spec.partition(":")
    names = (*_RANGES, "buckets")
    reader = SpecReader(spec, parts if colon else None, names=names, sign="=", example=_SYNTAX.example)
    request: dict[str, Any] = reader.numbers(_RANGES)
    if "buckets" in reader.values:
        factors = reader.values["buckets"].split("/")
        buckets = tuple(reader.number("buckets", factor, minimum=2, maximum=_MOST_FACTOR) for factor in factors)
        if any(factor % 2 for factor in buckets):
            raise InputError(
                Setting("attention", spec),
                f" has {' x '.join(map(str, buckets))} buckets; each number must be even: half of the buckets are "
                "directions, and half are their opposites.",
                hint=("For example: ", Setting("attention", "lsh:buckets=32")),
            )
        request["buckets"] = buckets
    return request


def _converted(request: Mapping[str, Any], *, layers: int, max_len: int) -> LshAttention:
    chunk = request.get("chunk", _DEFAULT_CHUNK)
    padded = -(-max_len // chunk) * chunk
    hashed: list[LayerType] = ["lsh"] * layers
    return LshAttention(
        layers=tuple(hashed),
        hashes=Hashes(
            buckets=request.get("buckets") or buckets_for(padded, chunk=chunk, positions=max_len),
            rounds=request.get("rounds", _DEFAULT_ROUNDS),
            seed=request.get("seed", _DEFAULT_SEED),
        ),
        hashed=Chunks(tokens=chunk, before=request.get("before", 1), after=request.get("after", 0)),
        local=None,
        multiple=chunk,
        converted=True,
    )


def _frozen(
    own: LshAttention, request: Mapping[str, Any], config: Any, max_len: int
) -> tuple[LshAttention, str | None]:
    """A Reformer's attention with all decisions that its code would make at the first text, and the record of them.

    An InputError rejects other chunks than the model was trained with.
    """
    if request.keys() & {"chunk", "before", "after"}:
        raise InputError(
            f"The config.json of a {config.model_type} sets its chunks; ",
            Setting("attention", "lsh"),
            " accepts rounds, buckets and seed for this model.",
            hint=("For example: ", Setting("attention", "lsh:rounds=8,seed=0")),
        )
    if own.hashed is None:
        if request:
            raise InputError(
                f"This {config.model_type} has local layers only, and hashes nothing.",
                hint=("Leave out ", Setting("attention"), "."),
            )
        return own, None
    chosen = []
    buckets, seed = request.get("buckets") or _buckets(config), request.get("seed", config.hash_seed)
    if buckets is None:
        padded = -(-max_len // own.multiple) * own.multiple
        buckets = buckets_for(padded, chunk=own.hashed.tokens, positions=config.max_position_embeddings)
        factors = " x ".join(map(str, buckets))
        chosen.append(f"num_buckets {factors}, as transformers takes for a first text of {max_len} tokens")
    if seed is None:
        seed = _DEFAULT_SEED
        chosen.append(f"hash_seed {seed} (lsh:seed=S chooses another)")
    hashes = Hashes(buckets=buckets, rounds=request.get("rounds", config.num_hashes), seed=seed)
    frozen = f"The config.json leaves values open, which the bundle fixes: {'; '.join(chosen)}." if chosen else None
    return dataclasses.replace(own, hashes=hashes), frozen


def _buckets(config: Any) -> tuple[int, ...] | None:
    buckets = config.num_buckets
    return None if buckets is None else (buckets,) if isinstance(buckets, int) else tuple(buckets)


def _own(record: LshAttention) -> LshConversion:
    return LshConversion(is_native=True, record=record, padding=PaddingRule(multiple_of=record.multiple))


def _warn_if_dense(record: LshAttention, max_len: int) -> None:
    chunks = [chunks.tokens for chunks in (record.hashed, record.local) if chunks is not None]
    if math.ceil(max_len / record.multiple) * record.multiple <= min(chunks):
        logger.warning(
            "Chunks of %d tokens cover every text of up to %d tokens: the attention is dense.", min(chunks), max_len
        )
