"""The attention types: one folder each beside this file; and the types in a bundle."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import hdexport.attention
from hdexport.attention.attention_type import (
    AttentionConversion,
    AttentionRecord,
    AttentionType,
    CliSyntax,
    ConversionContext,
    OperatorNode,
)
from hdexport.attention.spec import InvalidSpecError
from hdexport.lowering.lowering import Lowering
from hdexport.lowering.nodes import operator_nodes, operator_of
from hdruntime.bundle.checked_json import JsonMismatchError, from_values
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BundleCorruptError, InputError, ModelError, Setting

if TYPE_CHECKING:
    import onnx_ir

_BODIES = Lowering()


@functools.cache
def attention_types() -> tuple[AttentionType, ...]:
    """Every attention type: the `ATTENTION_TYPE` of each folder's ``attention_type.py``."""
    folders = [module.name for module in pkgutil.iter_modules(hdexport.attention.__path__) if module.ispkg]
    modules = [importlib.import_module(f"hdexport.attention.{folder}.attention_type") for folder in folders]
    return tuple(sorted((module.ATTENTION_TYPE for module in modules), key=lambda type_: (type_.rank, type_.name)))


def attention_type_named(name: object) -> AttentionType:
    """The attention type of that name; a BundleCorruptError for unknown names."""
    for type_ in attention_types():
        if type_.name == name:
            return type_
    known = ", ".join(type_.name for type_ in attention_types())
    raise BundleCorruptError(
        f"The bundle has the attention type {name!r}; known here: {known}.",
        hint="Install a newer hdexport: pip install -U hdexport",
    )


def cli_syntaxes() -> dict[str, CliSyntax]:
    """The syntaxes of ``--attention``'s value, by the first word of the value."""
    return {word: syntax for type_ in attention_types() for word, syntax in type_.syntaxes.items()}


def lowering_of(node: onnx_ir.Node) -> Lowering:
    """The lowering of a node of one of hdexport's operators for the backends; by default its function body."""
    operator = operator_of(node).name
    lowerings = (lowering for type_ in attention_types() for lowering in type_.lowerings)
    return next((lowering for lowering in lowerings if lowering.operator == operator), _BODIES)


def lowerings_of(model: onnx_ir.Model) -> list[tuple[onnx_ir.Node, Lowering]]:
    """The nodes of hdexport's operators in a graph, in its order, with the lowering of each."""
    return [(node, lowering_of(node)) for node in operator_nodes(model)]


def attention_from_spec(spec: str | None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parse the value of ``--attention`` and the options of attention types.

    Args:
        spec: value of ``--attention``, such as ``window:256,global:1``; None by default.
        options: options that types declare, by their names in Python: ``{"max_global": 32}``.

    Returns:
        name of an attention type -> its request, for the types that have one.

    Raises:
        InputError: a value does not have its syntax, or a number is out of its range.
    """
    reader = None if spec is None else next((type_ for type_ in attention_types() if type_.reads(spec)), None)
    if spec is not None and reader is None:
        raise _invalid_syntax(spec, spec)
    requests = {}
    for type_ in attention_types():
        try:
            request = type_.request(spec if type_ is reader else None, options or {})
        except InvalidSpecError as error:
            raise _invalid_syntax(str(spec), error.part) from None
        if request is not None:
            requests[type_.name] = request
    return requests


def attention_conversions(requests: Mapping[str, Any], context: ConversionContext) -> dict[str, AttentionConversion]:
    """The attention that a model has or is given: name of an attention type -> conversion.

    Raises:
        ModelError: the model cannot be converted as requested.
        InputError: a request does not fit the model.
    """
    fitted = {type_.name: type_.conversion(requests.get(type_.name), context) for type_ in attention_types()}
    conversions = {name: conversion for name, conversion in fitted.items() if conversion is not None}
    if context.query_scale is not None:
        _check_scaled(conversions, context)
    if context.recurrence is not None and all(conversion.memory_cache is None for conversion in conversions.values()):
        convertible = context.family.conversion_unsupported_reason is None
        windows = (", or use windows: ", Setting("attention", "window:256,right:0,global:0"))
        raise InputError(
            Setting("recurrence", context.recurrence),
            f" does not fit this {context.model.config.model_type}: its attention has no recurrent state.",
            hint=("Leave it out", *(windows if convertible else ()), "."),
        )
    return conversions


def _check_scaled(conversions: Mapping[str, AttentionConversion], context: ConversionContext) -> None:
    """Reject a query factor for attention that does not scale queries."""
    logn, model_type = Setting("attention_scale", "logn"), context.model.config.model_type
    hint = ("Use ", Setting("attention_scale", "none"), ".")
    if any(conversion.is_native for conversion in conversions.values()):
        raise InputError(
            logn,
            " is for queries that attend to more tokens than in training; the windows or blocks of this "
            f"{model_type} have a fixed size at every length.",
            hint=hint,
        )
    if context.family.native_attention is not None:
        raise InputError(logn, f" cannot scale the queries of a {model_type} with dense attention.", hint=hint)
    for name in conversions:
        if not attention_type_named(name).scales_queries:
            raise InputError(logn, f" cannot scale the queries of attention {name!r}.", hint=hint)


def attention_records(
    conversions: Mapping[str, AttentionConversion], nodes: Sequence[OperatorNode]
) -> Iterator[dict[str, Any]]:
    """The manifest's records of the attention types in a graph, as JSON values.

    Args:
        conversions: the conversions that the graph was traced with.
        nodes: nodes of hdexport's operators in the graph, in the graph's order.
    """
    for type_ in attention_types():
        record = type_.record(conversions.get(type_.name), nodes)
        if record is not None:
            yield msgspec.to_builtins(record)


def check_unseen_tokens(
    conversions: Mapping[str, AttentionConversion], nodes: Sequence[OperatorNode], *, model_type: str
) -> None:
    """Reject, by a ModelError, attention without outputs for tokens that no query attends to (ColBERT's expansion)."""
    for type_ in attention_types():
        if type_.record(conversions.get(type_.name), nodes) is not None and not type_.masked_tokens_attend(nodes):
            raise ModelError(
                "The model expands queries by tokens that attend to the query and that no token attends to (attend: "
                f"false), which attention {type_.name!r} of this {model_type} does not compute.",
                hint=(
                    "Choose a model with dense attention or windows, or one that attends to the expansion, or build "
                    "its token embeddings: ",
                    Setting("task", "feature-extraction"),
                ),
            )


class Attention(NamedTuple):
    """An attention type in a bundle, and its record in the manifest."""

    type: AttentionType
    record: AttentionRecord


def attention_of(manifest: Manifest) -> list[Attention]:
    """The attention types of a bundle; a BundleCorruptError for an unknown type or a malformed record."""
    items = []
    for index, values in enumerate(manifest.attention):
        type_ = attention_type_named(values.get("type"))
        try:
            record = from_values(values, type_.record_type, name=f"manifest.attention[{index}]")
            for problem in type_.problems(record, manifest):
                raise JsonMismatchError(f"manifest.attention[{index}]{problem}")
        except JsonMismatchError as error:
            raise BundleCorruptError(f"{error}.", hint="Rebuild or copy the bundle again.") from None
        items.append(Attention(type_, record))
    return items


def _invalid_syntax(spec: str, part: str) -> InputError:
    known = cli_syntaxes()
    listed = "\n".join(f"  {syntax.grammar}" for syntax in known.values())
    nearest = known.get(spec.partition(":")[0], next(iter(known.values())))
    return InputError(
        Setting("attention", spec),
        f" has an invalid part: {part!r}.",
        hint=(
            f"The syntax is one of\n{listed}\n{nearest.grammar}: {nearest.help}.\nFor example: ",
            Setting("attention", nearest.example),
        ),
    )
