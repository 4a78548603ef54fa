"""Folders that `Dataset.save_to_disk` of Hugging Face's datasets writes: Arrow files, and notes that are no rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from hdruntime.errors import InputError
from hdruntime.jobs.sources import Source, read_errors_explained

logger = logging.getLogger(__name__)

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_NOTES = (_STATE, _SPLITS, "dataset_info.json")
_MAX_NOTE_BYTES = 2**24

Sources = Mapping[PurePosixPath, Source]
Folder = PurePosixPath


def without_notes(found: Sequence[Source]) -> list[Source]:
    """The files, with those of saved datasets in the order of their rows and without their notes.

    The splits of a `DatasetDict` follow each other in its order. Other files in the folder of a saved dataset, such as
    ``cache-*.arrow`` of its ``map``, are skipped with a warning.

    Raises:
        InputError: a data file or a split is missing, or the rows are chosen by a file of indices.
    """
    sources = {PurePosixPath(source.path): source for source in found}
    states = {path.parent: note for path, note in _notes(sources, _STATE, "_data_files")}
    if not states:
        return list(found)
    splits = {path.parent: note for path, note in _notes(sources, _SPLITS, "splits")}
    emitted: set[Folder] = set()
    files: list[Source] = []
    for path, source in sources.items():
        root = next((folder for folder in path.parents if folder in splits), None)
        for folder in [path.parent] if root is None else [root / str(split) for split in splits[root]["splits"]]:
            if folder in states and folder not in emitted:
                emitted.add(folder)
                files += _data_files(folder, states[folder], sources)
            elif root is not None and folder not in states:
                raise InputError(
                    f"{source.name} belongs to a DatasetDict, whose split {folder.name!r} is missing.",
                    hint="Copy the whole folder, or name the folders of the splits that are there.",
                )
        is_note = path.name in _NOTES and (path.parent in states or path.parent in splits)
        if path.parent not in states and not is_note:
            files.append(source)
        elif not is_note and source not in files:
            logger.warning("%s is skipped: the saved dataset in its folder does not list it", source.name)
    return files


def _notes(sources: Sources, name: str, key: str) -> Iterator[tuple[PurePosixPath, dict[str, Any]]]:
    """Each note of that name which holds a list under the key."""
    for path, source in sources.items():
        if path.name == name:
            with read_errors_explained(source.name), source.opened() as stream:
                content = stream.read(_MAX_NOTE_BYTES)
            try:
                note = json.loads(content)
            except ValueError:
                continue
            if isinstance(note, dict) and isinstance(note.get(key), list):
                yield path, note


def _data_files(folder: Folder, state: Mapping[str, Any], sources: Sources) -> list[Source]:
    note = sources[folder / _STATE].name
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InputError(
            f"{note} chooses the dataset's rows by a file of indices, which a job does not read.",
            hint="Save it without one: ds.flatten_indices().save_to_disk(...), or ds.to_parquet('rows.parquet')",
        )
    names = [str(each.get("filename") if isinstance(each, dict) else each) for each in state["_data_files"]]
    missing = [name for name in names if folder / name not in sources]
    if missing:
        raise InputError(
            f"{note} lists the file {missing[0]}, which is not among the inputs.",
            hint="Name the whole folder, or save the dataset again: ds.save_to_disk(...)",
        )
    return [sources[folder / name] for name in names]
