"""Uploads a bundle to the Hugging Face Hub, with its model card, in one commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdexport.bench.results.files import read_result
from hdexport.bench.results.formatting import bytes_text, error_text, ms_text
from hdexport.bench.results.result import BenchResult
from hdexport.support.redaction import redact
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import MANIFEST_FILE
from hdruntime.errors import HdexportError, OutputExistsError, Setting
from hdruntime.hub import HubName, hub_name
from hdruntime.optional import require
from hdruntime.tasks.of_bundle import class_of

_CARD = "README.md"
_PIPELINE_TAGS: Mapping[Task, Task | None] = {
    Task.SPARSE_SIMILARITY: Task.FEATURE_EXTRACTION,
    Task.TOKEN_SIMILARITY: Task.FEATURE_EXTRACTION,
    Task.HYBRID_SIMILARITY: Task.SENTENCE_SIMILARITY,
    Task.TEXT_SCORING: None,
}
"""The Hub's names of tasks that have another name there, or none."""

_OF_THE_HUB = (".gitattributes",)
"""Files that the hub itself puts into a repository."""

_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Where a bundle goes.

    Attributes:
        name: name of the repository on the Hub; the revision is the branch, None for main.
        private: whether only its owners can see a repository that is made.
        bench: file or directory of `hdexport bench`, whose figures the card has.
        force: replace files of the repository, the card among them.
    """

    name: HubName
    private: bool = False
    bench: Path | None = None
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A bundle on the hub.

    Attributes:
        url: URL of its commit.
        commit: hash of its commit.
        size_bytes: size of its files.
    """

    url: str
    commit: str
    size_bytes: int


def push(bundle: Bundle, options: PushOptions, *, summary: Iterable[tuple[str, str]]) -> Pushed:
    """Upload every file of a bundle and its card. Nothing of the repository changes unless all are there.

    Args:
        bundle: opened, with every file checked.
        summary: summary of the bundle, for its model card.

    Raises:
        OutputExistsError: the repository holds files, which may not be replaced.
        InputError: the figures cannot be read.
        HdexportError: the hub does not take it.
    """
    # The file may be an older version's, or another program's.
    measured = None if options.bench is None else redact(read_result(options.bench))
    card = model_card(bundle.manifest, options.name, summary=summary, measured=measured)
    hub = require("huggingface_hub")
    names = [MANIFEST_FILE, *bundle.manifest.files]
    files: dict[str, Path | bytes] = {name: bundle.path / name for name in names}
    files[_CARD] = card.encode()
    try:
        return _committed(hub, files, options)
    except (HdexportError, MemoryError):
        raise
    except Exception as error:
        # The client raises its own, httpx' and the operating system's errors alike.
        message = " ".join(str(error).split())
        raise HdexportError(
            f"The bundle could not be pushed to {options.name}: {message:.400}",
            hint="Log in with `hf auth login` or HF_TOKEN, and check that the organisation and the branch are yours.",
        ) from error


def _committed(hub: Any, files: dict[str, Path | bytes], options: PushOptions) -> Pushed:
    api, name, branch = hub.HfApi(), options.name.name, options.name.revision
    api.create_repo(name, private=options.private, exist_ok=True)
    if branch is not None:
        api.create_branch(name, branch=branch, exist_ok=True)
    there = [file for file in api.list_repo_files(name, revision=branch) if file not in _OF_THE_HUB]
    if there and not options.force:
        listed = ", ".join(there[:_MOST_NAMED]) + (", ..." if len(there) > _MOST_NAMED else "")
        raise OutputExistsError(
            f"{options.name} on the Hugging Face Hub holds {listed}.",
            hint=(
                "Choose another name, or replace the files of a bundle and the card with ",
                Setting("force", True),
                ".",
            ),
        )
    added = [hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=content) for file, content in files.items()]
    commit = api.create_commit(name, added, commit_message="Bundle of hdexport", revision=branch)
    sizes = (len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())
    return Pushed(url=commit.commit_url, commit=commit.oid, size_bytes=sum(sizes))


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
            f"{manifest.name} as a bundle of hdexport, for texts of 1 to {manifest.max_len} tokens: ONNX graphs for "
            "CPUs and GPUs, and how their outputs compare with PyTorch's.",
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
    pipeline_tag = _PIPELINE_TAGS.get(manifest.task, manifest.task)
    if pipeline_tag is not None:
        yield f"pipeline_tag: {pipeline_tag}"
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
