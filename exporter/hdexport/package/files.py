"""Files that a package takes from its bundle."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from hdexport.package.graph import write_graph
from hdexport.package.target import Package
from hdruntime.constants import MANIFEST_FILE

_OF_THE_LIBRARY = ("config.json", "special_tokens_map.json")


def write_tokenizer(package: Package, directory: Path | None = None) -> None:
    directory = directory or package.directory
    info = package.bundle.manifest.tokenizer
    assert info is not None
    tokenizer = Tokenizer.from_file(str(package.bundle.file(info.file)))
    tokenizer.enable_truncation(package.max_seq_length, direction=info.truncation_side)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    source = package.bundle.path / "tokenizer_config.json"
    values = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    write_json(directory / "tokenizer_config.json", values | {"model_max_length": package.max_seq_length})


def write_library_files(package: Package, directory: Path | None = None) -> None:
    """Write the files by which transformers and its relatives read a model."""
    directory = directory or package.directory
    for name in _OF_THE_LIBRARY:
        if (package.bundle.path / name).is_file():
            shutil.copyfile(package.bundle.path / name, directory / name)
    write_tokenizer(package, directory)


def write_bundle(package: Package, directory: Path) -> None:
    """Copy the bundle into a folder of the package, for systems that run hdexport's runtime."""
    for file in (MANIFEST_FILE, *package.bundle.manifest.files):
        target = directory / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package.bundle.path / file, target)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_text(package: Package, name: str, template: str) -> None:
    """Write a file from a template, in which ``$name``, ``$length`` and ``$size`` are the package's."""
    values = {"name": package.name, "length": str(package.max_seq_length)}
    if "$size" in template:
        values["size"] = str(package.hidden_size)
    text = string.Template(template).safe_substitute(values)
    (package.directory / name).write_text(text, encoding="utf-8")


def with_bundle(templates: Mapping[str, str]) -> Callable[[Package], None]:
    """The function that writes a package of the bundle, in the folder ``bundle``, and files.

    Args:
        templates: name of a file -> its template, see `write_text`.
    """

    def write(package: Package) -> None:
        write_bundle(package, package.directory / "bundle")
        for name, template in templates.items():
            write_text(package, name, template)

    return write


def with_graph(
    templates: Mapping[str, str], *, library_files: Callable[[Package], None] = write_library_files
) -> Callable[[Package], None]:
    """The function that writes a package of ``model.onnx``, a library's files, and files.

    Args:
        templates: name of a file -> its template, see `write_text`.
        library_files: `write_tokenizer` for systems that read no other of these files.
    """

    def write(package: Package) -> None:
        write_graph(package.bundle, package.directory / "model.onnx", package.graph)
        library_files(package)
        for name, template in templates.items():
            write_text(package, name, template)

    return write
