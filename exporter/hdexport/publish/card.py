"""The model card of a bundle: its parts, lengths and verification, its use, its speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hdexport.bench.results.words import bytes_text, error_text, ms_text
from hdruntime.bundle.hub import HubName, hub_name
from hdruntime.bundle.manifest import Manifest
from hdruntime.tasks.of_bundle import class_of

if TYPE_CHECKING:
    from hdexport.bench.results.result import BenchResult


def model_card(
    manifest: Manifest, name: HubName, *, summary: Iterable[tuple[str, str]], measured: BenchResult | None = None
) -> str:
    """The content of ``README.md``; the summary describes the bundle, name -> value in order, and `measured` are
    figures of `hdexport bench`."""
    origin = hub_name(str(manifest.made_by.get("source")))
    return "\n".join(
        [
            "---",
            *_front_matter(manifest, origin),
            "---",
            f"# {name.name.rpartition('/')[2]}",
            "",
            f"{manifest.name} as a bundle of [hdexport](https://github.com/hdexport/hdexport), for texts of 1 to "
            f"{manifest.max_len} tokens: ONNX graphs that run on any CPU and GPU, and what was checked of them.",
            "",
            "## Use",
            "",
            *_usage(manifest, name),
            "",
            "## The bundle",
            "",
            *_table(("", ""), summary),
            *(() if measured is None else _figures(measured)),
            "",
        ]
    )


def _front_matter(manifest: Manifest, origin: HubName | None) -> Iterator[str]:
    yield "library_name: hdexport"
    pipeline = class_of(manifest.task).pipeline()
    if pipeline is not None:
        yield f"pipeline_tag: {pipeline}"
    if origin is not None:
        yield f"base_model: {origin.name}"
    yield "tags:"
    is_of_library = "modules.json" in manifest.files
    yield from (f"- {tag}" for tag in ("onnx", "hdexport", *(["sentence-transformers"] if is_of_library else [])))


def _usage(manifest: Manifest, name: HubName) -> Iterator[str]:
    encoder = class_of(manifest.task).encoder_of(manifest)
    yield "```python"
    yield "# pip install 'hdexport[hub]'"
    if encoder is None or encoder.call is None:
        yield from ("import hdruntime", "", f'session = hdruntime.load("{name}")')
    else:
        yield from (f"from hdruntime import {encoder.name}", "", f'model = {encoder.name}("{name}")')
        yield f"model.{encoder.call}"
    yield from ("```", "", "```sh", f"hdexport run {name} texts.jsonl -o out.parquet", "```")
    if "modules.json" in manifest.files:
        yield from (
            "",
            "It is also a directory of sentence-transformers, where `optimum-onnx` is installed:",
            "",
            "```python",
            f'SentenceTransformer("{name}", backend="onnx")',
            "```",
        )


def _figures(measured: BenchResult) -> Iterator[str]:
    cpu = measured.environment.get("cpu", "")
    yield from ("", "## Measured", "", f"`{measured.command}`, {measured.date[:10]}{f', {cpu}' if cpu else ''}:", "")
    rows = []
    for case in measured.cases:
        memory = None if case.memory is None else case.memory.peak_bytes
        if case.latency is not None:
            rows.append(
                (
                    case.series,
                    f"{case.batch} x {case.tokens}",
                    ms_text(case.latency.p50_ms),
                    "" if memory is None else bytes_text(memory),
                    error_text(case.error),
                )
            )
    yield from _table(("", "texts x tokens", "median", "peak memory", "error"), rows)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{'|'.join(['---'] * len(names))}|"
    for row in rows:
        yield f"| {' | '.join(_cell(value) for value in row)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
