"""Uploads a bundle to the Hugging Face Hub, with its model card, in one commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdexport.bench.results.files import read_result
from hdexport.publish.card import model_card
from hdexport.support.published import published
from hdruntime.bundle.hub import HubName
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import MANIFEST_FILE
from hdruntime.errors import HdexportError, OutputExistsError
from hdruntime.optional import require

_CARD = "README.md"
_OF_THE_HUB = (".gitattributes",)
"""Files that the hub itself puts into a repository."""

_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Where a bundle goes.

    Attributes:
        name: on the hub; the revision is the branch, None for main.
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
        url: of its commit.
        commit: by which it can be pinned.
        size_bytes: of its files.
    """

    url: str
    commit: str
    size_bytes: int


def push(bundle: Bundle, options: PushOptions, *, summary: Iterable[tuple[str, str]]) -> Pushed:
    """Upload every file of a bundle and its card. Nothing of the repository changes unless all are there.

    Args:
        bundle: opened, with every file checked.
        options: where it goes.
        summary: of the bundle, for its card.

    Raises:
        OutputExistsError: the repository holds files, which may not be replaced.
        InputError: the figures cannot be read.
        HdexportError: the hub does not take it.
    """
    # The file may be an older version's, or another program's.
    measured = None if options.bench is None else published(read_result(options.bench))
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
        said = " ".join(str(error).split())
        raise HdexportError(
            f"The bundle could not be pushed to {options.name}: {said:.400}\n"
            "Log in with `hf auth login` or HF_TOKEN, and check that the organisation and the branch are yours."
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
            f"{options.name} on the Hugging Face Hub holds {listed}.\n"
            "Choose another name, or replace the files of a bundle and the card with --force."
        )
    added = [hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=content) for file, content in files.items()]
    commit = api.create_commit(name, added, commit_message="Bundle of hdexport", revision=branch)
    sizes = (len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())
    return Pushed(url=commit.commit_url, commit=commit.oid, size_bytes=sum(sizes))
