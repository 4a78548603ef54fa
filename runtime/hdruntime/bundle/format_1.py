"""Manifests of format version 1: attention in five keys, inputs without roles."""

from __future__ import annotations

__all__ = ["from_format_1"]

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hdruntime.bundle.checked_json import JsonMismatchError, from_values
from hdruntime.bundle.manifest import TensorSpec
from hdruntime.bundle.value_types import Count, Length, Size, TokenCount, TokenId
from hdruntime.constants import FORMAT_VERSION

_BLOCK_SPARSE_MODELS = ("big_bird", "bigbird_pegasus")
"""Models trained with it; in others it replaced dense attention."""

_MODES_OF_KIND = {"bigbird": ("hf_eval", "table"), "etc": ("none",), "blocks": ("lists",)}


@dataclass(frozen=True, kw_only=True)
class _Window:
    tokens: Length
    global_tokens: TokenCount
    dilation: tuple[Length, ...]


@dataclass(frozen=True, kw_only=True)
class _BlockSparse:
    kind: Literal["bigbird", "etc", "blocks"]
    block_size: Length
    mode: Literal["hf_eval", "table", "lists", "none"]
    random_blocks: Count
    global_tokens: TokenCount
    last_block: Literal["padded", "row"]
    dense_tokens: TokenCount


@dataclass(frozen=True, kw_only=True)
class _GlobalAttention:
    default: Literal["first_token", "question"]
    bound: Length
    separator_id: TokenId | None


@dataclass(frozen=True, kw_only=True)
class _Format1:
    """The keys of such a manifest that today's format writes differently."""

    model_type: str
    num_heads: Size
    attention: dict[str, Size]
    inputs: tuple[TensorSpec, ...]
    windows: tuple[TokenCount, ...] = ()
    window: _Window | None = None
    block_sparse: _BlockSparse | None = None
    global_attention: _GlobalAttention | None = None
    token_type_separator_id: TokenId | None = None


def from_format_1(values: object) -> dict[str, Any]:
    """The values of a manifest in today's format.

    Args:
        values: of a manifest of format version 1, as JSON has them.

    Raises:
        JsonMismatchError: a value is missing, wrong, or contradicts another.
    """
    old = from_values(values, _Format1, name="manifest")
    assert isinstance(values, dict)
    for problem in _problems(old):
        raise JsonMismatchError(f"manifest.{problem}")
    return {
        **{key: value for key, value in values.items() if key not in _Format1.__dataclass_fields__},
        "format_version": FORMAT_VERSION,
        "model_type": old.model_type,
        "num_heads": old.num_heads,
        "operators": old.attention,
        "attention": [*_records(old)],
        "inputs": [_input(old, spec) for spec in old.inputs],
        "padding": _padding(old.block_sparse),
    }


def _problems(old: _Format1) -> list[str]:
    found = []
    if not old.attention:
        found.append("attention lists no operator; every encoder has one")
    if old.window is not None and len(old.window.dilation) not in (1, old.num_heads):
        found.append(f"window.dilation has {len(old.window.dilation)} values for {old.num_heads} heads")
    blocks, marks = old.block_sparse, old.global_attention
    if blocks is not None and blocks.mode not in _MODES_OF_KIND[blocks.kind]:
        modes = " or ".join(_MODES_OF_KIND[blocks.kind])
        found.append(f"block_sparse.mode should be {modes} for {blocks.kind}, not {blocks.mode}")
    has_marks = "global_attention_mask" in {spec.name for spec in old.inputs}
    if has_marks and marks is None:
        found.append("global_attention is missing, and the input global_attention_mask needs it")
    if marks is not None and not has_marks:
        found.append("global_attention needs an input global_attention_mask")
    if marks is not None and (marks.separator_id is None) != (marks.default == "first_token"):
        found.append(f"global_attention.separator_id is {marks.separator_id} for the default {marks.default}")
    return found


def _records(old: _Format1) -> list[dict[str, Any]]:
    """The kinds of attention, as `hdexport.attention` names and describes them."""
    records: list[dict[str, Any]] = []
    dense = sum(count for name, count in old.attention.items() if name.endswith("DenseAttention"))
    if dense:
        records.append({"kind": "dense", "layers": dense})
    if old.windows or old.window is not None:
        window = None if old.window is None else {**asdict(old.window), "dilation": list(old.window.dilation)}
        records.append({"kind": "window", "layers": list(old.windows), "converted": window})
    if old.block_sparse is not None:
        fields = asdict(old.block_sparse)
        pattern = fields.pop("kind")
        converted = old.model_type not in _BLOCK_SPARSE_MODELS
        records.append({"kind": "blocks", "pattern": pattern, **fields, "converted": converted})
    return records


def _input(old: _Format1, spec: TensorSpec) -> dict[str, Any]:
    described: Mapping[str, Any] = {
        "input_ids": {"role": "ids", "default": {"fill": "required"}},
        "attention_mask": {"role": "mask", "default": {"fill": "ones"}},
        "token_type_ids": {"role": "token_types", "default": _token_types(old.token_type_separator_id)},
        "global_attention_mask": _marks(old.global_attention),
    }
    if spec.name not in described:
        raise JsonMismatchError(f"manifest.inputs: the name should be one of {', '.join(described)}, not {spec.name!r}")
    return {**asdict(spec), "shape": list(spec.shape), **described[spec.name]}


def _token_types(separator_id: int | None) -> dict[str, Any]:
    return {"fill": "zeros"} if separator_id is None else {"fill": "after_token", "token_id": separator_id}


def _marks(marks: _GlobalAttention | None) -> dict[str, Any]:
    if marks is None:
        return {}
    fill = "first_token" if marks.separator_id is None else "until_token"
    return {"role": "marks", "default": {"fill": fill, "token_id": marks.separator_id}, "bound": marks.bound}


def _padding(blocks: _BlockSparse | None) -> dict[str, int] | None:
    if blocks is None or blocks.last_block == "row":
        return None
    return {"multiple_of": blocks.block_size, "free_up_to": blocks.dense_tokens}
