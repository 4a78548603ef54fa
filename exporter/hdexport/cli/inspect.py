"""Show a bundle's model, positions, graphs with their operators, engines, files and comparison with PyTorch.

Files are listed and not read, unless ``--checksums`` is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hdexport.cli.arguments import local_path
from hdruntime.errors import BundleCorruptError

if TYPE_CHECKING:
    from hdruntime.bundle.manifest import EngineFile, GraphFile, Manifest, TensorSpec, TokenizerInfo
    from hdruntime.bundle.reader import Bundle
    from hdruntime.bundle.sentence_settings import MultiVectorSettings, SentenceSettings
    from hdruntime.bundle.verification import VerificationRecord

SUMMARY = "show what is in a bundle"

_SHOWN_OF_SHA256 = 12

_GLOBAL_TOKENS = {"zeros": "none", "first_token": "the first token", "until_token": "the question's tokens"}
"""Default of the global attention mask -> the global tokens."""

_MADE_BY_KEYS = ("command", "date", "source", "rebuilt by", "rebuilt on")
"""Keys of ``made_by`` that have their own line; the others are versions of packages."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=local_path, help="directory of the bundle")
    parser.add_argument(
        "--fix-checksum",
        action="store_true",
        help="update the checksum of a manifest.json that was edited by hand, if its values are valid",
    )
    parser.add_argument(
        "--checksums",
        action="store_true",
        help="compare every file with its checksum, as loading a bundle does; 0.5 s per GB. By default only presence "
        "and size of the files are checked",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Check the bundle and print its manifest in words."""
    from hdruntime.bundle.reader import open_bundle

    if options.fix_checksum:
        from hdexport.support.bundle_writer import fix_checksum

        fix_checksum(options.bundle)
    bundle = open_bundle(options.bundle, check_files=options.checksums)
    metadata = {engine.file: _engine_metadata(bundle, engine) for engine in bundle.manifest.engines}
    if options.json:
        everything = {
            "path": str(bundle.path),
            "size_bytes": _size_bytes(bundle.manifest),
            "engine_metadata": metadata,
            "manifest": dataclasses.asdict(bundle.manifest),
        }
        print(json.dumps(everything, indent=2))
        return 0
    _show(bundle, metadata, checksums=options.checksums)
    return 0


def _engine_metadata(bundle: Bundle, engine: EngineFile) -> dict[str, object]:
    from hdruntime.bundle.checked_json import from_json

    path = bundle.file(engine.metadata)
    try:
        # Everything is shown, including keys of later versions.
        return from_json(path.read_bytes(), dict[str, object], name="engine metadata")
    except (OSError, ValueError) as error:
        raise BundleCorruptError(
            f"The engine metadata {path} cannot be read: {error}.", hint="Rebuild the bundle."
        ) from None


def _show(
    bundle: Bundle,
    metadata: dict[str, dict[str, object]],
    *,
    checksums: bool,
) -> None:
    from hdexport.cli.verification_table import print_verification

    manifest = bundle.manifest
    _pairs(str(bundle.path), summary(manifest))
    _table(
        "Inputs and outputs",
        ("", "name", "type", "shape", "values"),
        [
            *(("input", *_tensor(spec), _values(manifest.number_of_values(spec))) for spec in manifest.inputs),
            *(("output", *_tensor(spec), "") for spec in manifest.outputs),
        ],
    )
    _table(
        "Graphs",
        ("graph", "lowering", "type", "nodes", "operators"),
        map(_graph_row, manifest.graphs),
    )
    if manifest.verification is not None:
        print_verification(manifest.verification, None, title="Verification")
        print(flush=True)
    for engine in manifest.engines:
        _pairs(f"Engine {engine.file}", _engine(engine, metadata[engine.file]))
    _table(
        f"Files, {'checksums' if checksums else 'sizes'} checked",
        ("file", "size", "sha256"),
        ((name, _size(record.size_bytes), record.sha256[:_SHOWN_OF_SHA256]) for name, record in manifest.files.items()),
    )


def summary(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yields what a bundle is, name and value; an empty name continues the one before."""
    from hdexport.cli.verification_table import overflow_text

    yield "model", f"{manifest.name} ({manifest.model_type})"
    yield "task", manifest.task
    yield "accepts", f"1 to {manifest.max_len} tokens"
    yield (
        "size",
        f"{_size(_size_bytes(manifest))}, format version {manifest.format_version}",
    )
    yield "parameters", f"{manifest.parameters:,} in {manifest.dtype}"
    yield (
        "architecture",
        f"{manifest.num_layers} layers, {manifest.num_heads} heads, hidden size {manifest.hidden_size}, "
        f"{manifest.vocab_size:,} ids",
    )
    yield "positions", _positions(manifest)
    if manifest.positions.reason:
        yield "", manifest.positions.reason
    operators = ", ".join(f"{name} x{count}" for name, count in manifest.operators.items())
    yield "attention", operators or "standard operators"
    yield from _attention(manifest)
    if manifest.kernel_nodes or manifest.kernel_architectures:
        yield "kernels", _kernels(manifest)
    yield from _carried(manifest)
    if manifest.adapter is not None:
        yield "adapter", f"{manifest.adapter}, in the weights"
    if manifest.ffn_chunk is not None:
        yield (
            "feed-forward",
            f"chunks of up to {manifest.ffn_chunk} tokens in ONNX Runtime, none in engines",
        )
    if manifest.labels:
        yield "labels", ", ".join(manifest.labels)
    info = manifest.tokenizer
    yield "tokenizer", _tokenizer(info) if info else "none"
    if info is not None:
        yield from _lengths(manifest)
    if manifest.sentence is not None:
        yield from _sentence(manifest, manifest.sentence)
        yield from _prompts(manifest.sentence)
    yield "verification", _verification(manifest.verification, unverified=manifest.unverified)
    if manifest.fp16_overflow is not None:
        yield "float16 range", overflow_text(manifest.fp16_overflow)
    yield from _made_by(manifest.made_by)


def _tokenizer(info: TokenizerInfo) -> str:
    ids = "transformers' class" if info.source == "library" else "the checkpoint's tokenizer.json"
    return f"{info.file}, ids of {ids}, pads with {info.pad_token} ({info.pad_token_id})"


def _lengths(manifest: Manifest) -> Iterator[tuple[str, str]]:
    from hdexport.model.limits import MAX_POSITIONS
    from hdruntime.text.lengths import model_length

    own, asked = model_length(manifest), manifest.tokenizer and manifest.tokenizer.text_length
    limited = own < manifest.max_len or (manifest.sentence is not None and own < MAX_POSITIONS)
    if asked is not None:
        yield "text length", f"{asked} tokens, from --max-len of the build"
        if limited:
            yield "", f"the checkpoint's limit is {own} tokens"
    elif limited:
        yield "text length", f"{own} tokens, the checkpoint's limit"


def _sentence(manifest: Manifest, settings: SentenceSettings) -> Iterator[tuple[str, str]]:
    """How the outputs become vectors or scores, by the settings of sentence-transformers."""
    if settings.kind == "cross-encoder":
        template = "" if settings.pair_template is None else " in the checkpoint's chat template"
        pooled = f", pools {' and '.join(settings.pooling)}" if settings.pooling else ""
        yield "cross-encoder", f"reads pairs of texts{template}{pooled}, scores by {settings.activation}"
        return
    steps = [
        *settings.pooling,
        *(["dense"] if settings.dense else []),
        *(["normalized"] if settings.normalize else []),
    ]
    if settings.truncate_dim is not None:
        steps.append(f"{settings.truncate_dim} dimensions kept")
    if settings.max_active_dims is not None:
        steps.append(f"{settings.max_active_dims} largest weights kept")
    multi_vector = settings.multi_vector
    of_tokens = ["of tokens"] if multi_vector is not None or not steps else []
    similarity = settings.similarity if multi_vector is None else multi_vector.similarity
    yield "vectors", f"{', '.join([*of_tokens, *steps])}; similarity {similarity}"
    if settings.text_template is not None:
        whose = "SentenceEncoder's texts" if manifest.template is None else "texts"
        yield "", f"{whose} are written in the checkpoint's chat template"
    if multi_vector is not None:
        yield from _sides(manifest, multi_vector)


def _sides(manifest: Manifest, settings: MultiVectorSettings) -> Iterator[tuple[str, str]]:
    """How queries and documents become tokens with vectors."""
    from hdruntime.text.lengths import Role, model_length

    sides: tuple[tuple[str, Role], ...] = (("queries", "query"), ("documents", "document"))
    for name, side in sides:
        parts = [f"truncated to {model_length(manifest, side)} tokens by the model"]
        expansion = settings.expansion if side == "query" else None
        if expansion is not None:
            seen = "which all tokens see" if expansion.attend else "which no token sees"
            parts.append(f"expanded to {expansion.length} by the token {expansion.token_id}, {seen}")
        if side in settings.skipped_in and settings.skipped_ids:
            parts.append(f"no vectors for {len(settings.skipped_ids)} tokens of the vocabulary")
        yield name, ", ".join(parts)


def _prompts(settings: SentenceSettings) -> Iterator[tuple[str, str]]:
    default = settings.default_prompt_name
    for name, prompt in settings.prompts.items():
        if prompt or name == default:
            yield f"prompt {name}", repr(prompt) + (" (default)" if name == default else "")
    if not settings.include_prompt:
        yield "", "prompt tokens are not pooled"


def _tensor(spec: TensorSpec) -> tuple[str, str, str]:
    return spec.name, spec.dtype, f"[{', '.join(map(str, spec.shape))}]"


def _values(number: int | None) -> str:
    """The values of an input; empty where any fit."""
    return "" if number is None else f"0 to {number - 1}"


def _positions(manifest: Manifest) -> str:
    positions = manifest.positions
    if positions.form == "distances":
        return "none"
    changes = "" if positions.attention_scale == "none" else f", queries scaled by {positions.attention_scale}"
    if positions.rope_factor is not None:
        changes += f", RoPE base times {positions.rope_factor:g} in layers with full attention"
    if positions.rows <= positions.base:
        return f"{positions.rows} of the checkpoint's {positions.base}, {positions.form}{changes}"
    alpha = "" if positions.alpha is None else f", alpha {positions.alpha:g}"
    first = "" if positions.first_row == 0 else f" (from row {positions.first_row})"
    return (
        f"{positions.scheme}{alpha}: {positions.rows} from the checkpoint's {positions.base} rows{first}, "
        f"{positions.form}{changes}"
    )


def _attention(manifest: Manifest) -> Iterator[tuple[str, str]]:
    from hdexport.attention.registry import attention_of
    from hdruntime.bundle.manifest import Role

    for item in attention_of(manifest):
        yield from item.type.describe(item.record)
    global_mask = manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
    if global_mask is not None:
        default = _GLOBAL_TOKENS[global_mask.default.fill.value]
        limit = "" if global_mask.bound is None else f", at most {global_mask.bound}"
        yield "global tokens", f"{default} unless given{limit}"


def _kernels(manifest: Manifest) -> str:
    if not manifest.kernel_architectures:
        limits = [node.architectures for node in manifest.kernel_nodes]
        named = {name.removeprefix("sm") for names in limits for name in names or ()}
        architectures = "SM" if None in limits else ",".join(sorted(named))
        return (
            "none; ONNX Runtime on a GPU computes attention with standard operators; to add kernels: "
            f"hdexport rebuild BUNDLE --target onnx --sm {architectures}"
        )
    users = [*(["engines"] if manifest.engines else []), *(["ONNX Runtime"] if manifest.kernel_nodes else [])]
    return f"for {', '.join(manifest.kernel_architectures)}, in {' and '.join(users)}"


def _carried(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.max_memory:
        start = "attended to" if manifest.min_memory == manifest.max_memory else "masked"
        yield "recurrent state", f"last {manifest.max_memory} tokens of earlier segments; missing tokens are {start}"
    elif manifest.recurrent_states:
        yield "recurrent state", ", ".join(spec.name for spec in manifest.recurrent_states)
    if manifest.document_tokens is not None:
        yield "", f"at most {manifest.document_tokens} tokens per document, over all segments"


def _verification(record: VerificationRecord | None, *, unverified: bool) -> str:
    if record is None:
        by_choice = " (--unverified), though no family was written for the model type" if unverified else ""
        return f"none{by_choice}; run: hdexport verify BUNDLE"
    graphs = record.graphs.values()
    cases = f"{sum(graph.passed for graph in graphs)} of {sum(graph.checks for graph in graphs)} cases"
    grid = "" if record.grid is None else f", {record.grid} grid"
    return f"{'passed' if record.passed else 'FAILED'}{grid}, {cases}"


def _made_by(made_by: dict[str, str]) -> Iterator[tuple[str, str]]:
    for key in _MADE_BY_KEYS:
        if made_by.get(key):
            yield f"made: {key}", made_by[key]
    versions = [f"{name} {version}" for name, version in made_by.items() if name not in _MADE_BY_KEYS]
    yield "made: with", ", ".join(versions) or "versions unknown"


def _engine(engine: EngineFile, metadata: dict[str, object]) -> Iterator[tuple[str, str]]:
    later = " and later" if engine.version_compatible else ""
    yield "made for", f"{engine.variant} {engine.version}{later}, {', '.join(engine.architectures)}"
    yield "precision", engine.precision
    for index, profile in enumerate(engine.profiles):
        axes = [(name, bounds) for name, bounds in dataclasses.asdict(profile).items() if bounds is not None]
        sizes = ", ".join(f"{name} {':'.join(map(str, bounds))}" for name, bounds in axes)
        yield f"profile {index}", f"{sizes} (min:opt:max)"
    shown = {field.name for field in dataclasses.fields(engine)}
    for key, value in metadata.items():
        if key not in shown:
            yield key, _plain(value)


def _plain(value: object) -> str:
    """A value of the engine metadata for people: JSON without its brackets and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return "none" if value is None else str(value)


def _graph_row(graph: GraphFile) -> tuple[str, ...]:
    """A row per graph, the most frequent operators first: a bundle may have eight graphs, too wide for columns."""
    operators = ", ".join(f"{name} {count}" for name, count in graph.operators.items())
    return graph.file, graph.lowering, graph.dtype, str(sum(graph.operators.values())), operators


def _size_bytes(manifest: Manifest) -> int:
    return sum(record.size_bytes for record in manifest.files.values())


def _size(size_bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(size_bytes)


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> None:
    _table(title, ("", ""), rows)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from hdexport.cli.verification_table import print_table

    print_table(title, columns, rows, right=("size", "nodes"))
    print(flush=True)
