"""The kinds of attention there are, and the kinds of a bundle."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import hdexport.attention
from hdexport.attention.kind import AttentionKind, AttentionRecord, Form, OperatorNode, Setup, Subject
from hdexport.attention.spec import NotUnderstoodError
from hdexport.lowering.lowering import Lowering
from hdexport.lowering.nodes import operator_nodes, operator_of
from hdruntime.bundle.checked_json import JsonMismatchError, from_values
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BundleCorruptError, InputError, ModelError
from hdruntime.optional import entry_points_of, made_by

if TYPE_CHECKING:
    import onnx_ir

_ENTRY_POINTS = "hdexport.attention"
"""Group in which other packages register theirs."""

_BODIES = Lowering()


@functools.cache
def kinds() -> tuple[AttentionKind, ...]:
    """Every kind: one per folder beside this file, and those of the entry points ``hdexport.attention``."""
    folders = [found.name for found in pkgutil.iter_modules(hdexport.attention.__path__) if found.ispkg]
    ours = [importlib.import_module(f"hdexport.attention.{folder}.kind").KIND for folder in folders]
    points = entry_points_of(_ENTRY_POINTS).values()
    others = filter(None, (made_by(point, "kind of attention") for point in points))
    return (*sorted(ours, key=lambda kind: (kind.rank, kind.name)), *others)


def kind_named(name: object) -> AttentionKind:
    """The kind of that name; refused by a BundleCorruptError where this installation has none."""
    for kind in kinds():
        if kind.name == name:
            return kind
    known = ", ".join(kind.name for kind in kinds())
    raise BundleCorruptError(
        f"The bundle has attention of the kind {name!r}; known here: {known}.",
        hint="Install the package that it comes from, or a newer hdexport: pip install -U hdexport",
    )


def forms() -> dict[str, Form]:
    """The forms of ``--attention``'s value, by the word that each begins with."""
    return {word: form for kind in kinds() for word, form in kind.forms.items()}


def lowering_of(node: onnx_ir.Node) -> Lowering:
    """Return what backends get in the place of a node of one of our operators."""
    operator = operator_of(node).name
    found = (lowering for kind in kinds() for lowering in kind.lowerings if lowering.operator == operator)
    return next(found, _BODIES)


def lowerings_of(model: onnx_ir.Model) -> list[tuple[onnx_ir.Node, Lowering]]:
    """The nodes of our operators in a graph, in its order, each with what backends get in its place."""
    return [(node, lowering_of(node)) for node in operator_nodes(model)]


def attention_from_spec(spec: str | None, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The request for each kind.

    Args:
        spec: value of ``--attention``, for example ``window:256,global:1``; None where it was not given.
        options: options that kinds declare, by their names in Python: ``{"max_global": 32}``.

    Returns:
        name of a kind -> its request, for the kinds that have one.

    Raises:
        InputError: a value is not of its form, or a number is out of its range.
    """
    reader = None if spec is None else next((kind for kind in kinds() if kind.reads(spec)), None)
    if spec is not None and reader is None:
        raise _not_understood(spec, spec)
    requests = {}
    for kind in kinds():
        try:
            request = kind.request(spec if kind is reader else None, options or {})
        except NotUnderstoodError as error:
            raise _not_understood(str(spec), str(error)) from None
        if request is not None:
            requests[kind.name] = request
    return requests


def attention_setups(requests: Mapping[str, Any], subject: Subject) -> dict[str, Setup]:
    """The attention that a model has, or gets: name of a kind -> setup, for the kinds that are in it.

    A ModelError says that the model cannot be given what was requested, an InputError that the request does not fit it.
    """
    found = {kind.name: kind.setup(requests.get(kind.name), subject) for kind in kinds()}
    setups = {name: setup for name, setup in found.items() if setup is not None}
    if subject.query_scale is not None:
        _check_scaled(setups, subject)
    if subject.recurrence is not None and all(setup.carried is None for setup in setups.values()):
        convertible = subject.family.why_not_converted is None
        raise InputError(
            f"--recurrence {subject.recurrence} does not fit this {subject.model.config.model_type}: its attention "
            "carries nothing from segment to segment.\nLeave it out"
            + (", or choose windows, which do: --attention window:256,right:0,global:0" if convertible else ".")
        )
    return setups


def _check_scaled(setups: Mapping[str, Setup], subject: Subject) -> None:
    """Refuse an attention that would leave the queries as they are."""
    model_type, advice = subject.model.config.model_type, "Use --attention-scale none."
    if any(setup.is_own for setup in setups.values()):
        raise InputError(
            f"--attention-scale logn is for queries that see more tokens than in training; the windows or blocks of "
            f"this {model_type} show them no more, however long the text.",
            hint=advice,
        )
    if subject.family.own is not None:
        raise InputError(
            f"--attention-scale logn cannot scale the queries of a {model_type} with dense attention.", hint=advice
        )
    for name in setups:
        if not kind_named(name).scales_queries:
            raise InputError(f"--attention-scale logn cannot scale the queries of attention {name!r}.", hint=advice)


def attention_records(setups: Mapping[str, Setup], nodes: Sequence[OperatorNode]) -> Iterator[dict[str, Any]]:
    """The manifest's record of each kind that is in a graph, as JSON has it, by the setups that the graph was traced
    with.
    """
    for kind in kinds():
        record = kind.record(setups.get(kind.name), nodes)
        if record is not None:
            yield msgspec.to_builtins(record)


def check_unseen_tokens(setups: Mapping[str, Setup], nodes: Sequence[OperatorNode], *, model_type: str) -> None:
    """Refuse, by a ModelError, attention with no answer for tokens that none sees, as ColBERT's queries have them."""
    for kind in kinds():
        if kind.record(setups.get(kind.name), nodes) is not None and not kind.masked_tokens_attend(nodes):
            raise ModelError(
                f"The model expands queries by tokens that see the query and are not seen (attend: false), which "
                f"attention {kind.name!r} of this {model_type} does not compute.",
                hint="Choose a model with dense attention or windows, or one that attends to the expansion, or "
                "build the vectors of its tokens: --task feature-extraction",
            )


class Attention(NamedTuple):
    """A kind in a bundle, and the manifest's record of it."""

    kind: AttentionKind
    record: AttentionRecord


def attention_of(manifest: Manifest) -> list[Attention]:
    """The attention of a bundle, one for each record; a BundleCorruptError names an unknown kind or a
    malformed record.
    """
    found = []
    for index, values in enumerate(manifest.attention):
        kind = kind_named(values.get("kind"))
        try:
            record = from_values(values, kind.record_type, name=f"manifest.attention[{index}]")
            for problem in kind.problems(record, manifest):
                raise JsonMismatchError(f"manifest.attention[{index}]{problem}")
        except JsonMismatchError as error:
            raise BundleCorruptError(f"{error}.", hint="Rebuild or copy the bundle again.") from None
        found.append(Attention(kind, record))
    return found


def _not_understood(spec: str, part: str) -> InputError:
    known = forms()
    listed = "\n".join(f"  {form.grammar}" for form in known.values())
    nearest = known.get(spec.partition(":")[0], next(iter(known.values())))
    return InputError(
        f"--attention {spec} is not understood at {part!r}.",
        hint=f"Its forms are\n{listed}\n{nearest.grammar}: {nearest.help}.\nFor example: --attention {nearest.example}",
    )
