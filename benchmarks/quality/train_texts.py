"""Writes long texts to train positions with: technical documents that no quality measurement asks about.

Usage: python -m benchmarks.quality.train_texts FOLDER [--cache DIR]

* ``pydoc/``: the pages that pydoc renders of the standard library's modules. Python's topics are not among them.
* one folder for each Debian package of `benchmarks.quality.debian.TRAINING`.

The texts depend on the installed Python and Debian's release: `hdexport tune` records their digest.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import pydoc
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from benchmarks.quality.debian import cache_folder, training_pages

_PACKAGES = (
    *("asyncio", "collections", "concurrent", "ctypes", "email", "html", "http", "importlib", "json", "logging"),
    *("multiprocessing", "sqlite3", "unittest", "urllib", "wsgiref", "xml"),
)
"""Packages of the standard library whose modules have pages, too."""

_NOT_IMPORTED = ("antigravity", "idlelib", "pydoc_data", "test", "this", "turtledemo")
"""Modules that do something when they are imported, and modules that hold texts to measure with."""

_SHORTEST_CHARACTERS = 2500
"""Shorter pages have fewer than 512 tokens."""

_BAR = re.compile(r"^( *)\| ?", re.MULTILINE)
"""The part that pydoc puts before the lines of a class."""


def main() -> int:
    """Write the texts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="receives the texts")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder that keeps downloaded packages")
    options = parser.parse_args()
    pages, versions = training_pages(options.cache)
    texts = {page.name: page.text for page in pages} | {f"pydoc/{name}": text for name, text in module_pages()}
    for name, text in texts.items():
        file = options.folder / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{len(texts)} texts of Python {sys.version.split()[0]}, {packages}")
    return 0


def module_pages() -> Iterator[tuple[str, str]]:
    """Name and long page of each public module of the standard library that this system has."""
    warnings.simplefilter("ignore")
    names = [name for name in sorted(sys.stdlib_module_names) if not name.startswith("_") and name not in _NOT_IMPORTED]
    for package in _PACKAGES:
        path = importlib.import_module(package).__path__
        names += [found.name for found in pkgutil.iter_modules(path, f"{package}.") if "._" not in found.name]
    for name in names:
        try:
            page = pydoc.render_doc(importlib.import_module(name), renderer=pydoc.plaintext)  # type: ignore[attr-defined]
        except ImportError:
            continue  # of another operating system
        if len(page) > _SHORTEST_CHARACTERS:
            yield name, _BAR.sub(r"\1", page)


if __name__ == "__main__":
    sys.exit(main())
