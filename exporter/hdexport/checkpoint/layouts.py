"""Layouts of checkpoints that other libraries read, whose parts are in other places than in a Hugging Face directory.

Each becomes a Hugging Face directory of links, into which nothing is copied.
"""

from __future__ import annotations

from pathlib import Path

from hdexport.checkpoint.adapters import ADAPTER_CONFIG, is_adapter
from hdexport.checkpoint.hub import local_snapshot
from hdexport.checkpoint.sentence_modules import encoder_folder
from hdexport.checkpoint.temporary_directory import Converted, written
from hdexport.checkpoint.tensorflow import google_files, has_google_config
from hdexport.support.json_files import read_json, read_object, shown
from hdruntime.errors import ModelError
from hdruntime.hub import HubName

_CONFIG, _MODULES = "config.json", "modules.json"
_OF_THE_WHOLE = ("config_sentence_transformers", "LICENSE", "NOTICE")
"""Stems of files that belong to a model of sentence-transformers, and not to its encoder."""

_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")
"""A folder with a tokenizer has one of these files."""


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory has a file by which checkpoints are recognised."""
    names = (_CONFIG, _MODULES, ADAPTER_CONFIG)
    return any((directory / name).is_file() for name in names) or has_google_config(directory)


def arranged(directory: Path) -> Converted | None:
    """A checkpoint of another layout as a Hugging Face directory; None for one that is in that layout."""
    if is_adapter(directory):
        return _with_model(directory)
    folder = encoder_folder(directory)
    if folder is not None:
        return _with_encoder(directory, folder)
    if not (directory / _CONFIG).exists() and has_google_config(directory):
        return _with_config(directory)
    return None


def _with_encoder(directory: Path, folder: Path) -> Converted:
    """The encoder's folder and the modules beside it, as sentence-transformers wrote them before version 2."""
    links = {
        entry.name: entry
        for entry in directory.iterdir()
        if entry.is_dir() or entry.suffix == ".py" or entry.stem in _OF_THE_WHOLE
    }
    first, *others = read_json(directory / _MODULES)
    modules = [{**first, "path": ""}, *others]
    return written(directory, links | _entries(folder), {_MODULES: modules})


def _with_config(directory: Path) -> Converted:
    """Google's configuration beside weights of PyTorch, as the first versions of transformers read them."""
    files, remarks = google_files(directory)
    return written(directory, _entries(directory), files, remarks=remarks)


def _with_model(directory: Path) -> Converted:
    """An adapter's folder with the files of the model that it changes; the adapter's own take precedence."""
    config = read_object(directory / ADAPTER_CONFIG)
    model = _model_of_adapter(directory, config.get("base_model_name_or_path"), config.get("revision"))
    own = {entry.name: entry for entry in directory.iterdir() if entry.stem not in ("adapter_config", "adapter_model")}
    has_tokenizer = any(file in own for file in _OF_A_TOKENIZER)
    of_model = {
        file: entry
        for file, entry in _entries(model).items()
        if entry.is_file() and "sentence" not in file and file != _MODULES and not (has_tokenizer and "token" in file)
    }
    folder = f"adapter-{directory.resolve().name}"
    links = {**of_model, **own, folder: directory.resolve()}
    remark = f"The adapter of {directory} is merged into the weights of {model}."
    return written(directory, links, {}, remarks=(remark,), adapter=folder)


def _model_of_adapter(directory: Path, name: object, revision: object) -> Path:
    """The model that an adapter changes: a path, a directory beside the adapter's, or in the hub's cache."""
    if not isinstance(name, str) or not name:
        raise ModelError(
            f"{directory} holds an adapter, and its {ADAPTER_CONFIG} names no model in base_model_name_or_path.",
            hint="Set that to the directory of the model that the adapter was trained for.",
        )
    cached = local_snapshot(HubName(name=name, revision=revision if isinstance(revision, str) else None))
    places = [Path(name), directory.resolve().parent / Path(name).name, *([] if cached is None else [cached])]
    for place in places:
        if (place / _CONFIG).is_file() and place.resolve() != directory.resolve():
            return place
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    raise ModelError(
        f"{directory} holds an adapter of the model {shown(name)}, without which its weights are of no use, and which "
        "is not on this machine.\n"
        + (f"Put the model into {places[1]}" if is_path else f"Download the model: hf download {name}")
        + ", and build again; or merge the adapter with PEFT: merge_and_unload(), then save_pretrained()."
    )


def _entries(directory: Path) -> dict[str, Path]:
    return {entry.name: entry for entry in directory.iterdir()}
