"""Writes long texts to train positions with: technical documents that no quality measurement asks about.

Usage: python -m benchmarks.quality.train_texts FOLDER [--packages NAME ...] [--manual-pages 600]

* ``pydoc/``: the pages that pydoc renders of the standard library's modules. Python's topics are not among them.
* ``man/``: the largest manual pages of this machine, rendered; those of Git are in its package below.
* ``NAME/``: the HTML pages of Debian's documentation packages, as text; apt downloads the packages.

The texts depend on the installed Python, manual pages and Debian release, so their digest belongs to a result:
`hdexport tune` records it.
"""

from __future__ import annotations

import argparse
import html.parser
import importlib
import pkgutil
import pydoc
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("debian-reference-en", "developers-reference", "git-doc", "postgresql-doc-15")

_PACKAGES_OF_MODULES = ("asyncio", "collections", "concurrent", "ctypes", "email", "html", "http", "importlib", "json")
_PACKAGES_OF_MODULES += ("logging", "multiprocessing", "sqlite3", "unittest", "urllib", "wsgiref", "xml")
_NOT_IMPORTED = ("antigravity", "idlelib", "pydoc_data", "test", "this", "turtledemo")
_FEWEST_CHARACTERS = 2500
"""Of a text; shorter ones have fewer tokens than a model without extension reads."""

_SECTIONS = (1, 5, 7, 8)
_BAR = re.compile(r"^( *)\| ?", re.MULTILINE)
_BLOCKS = ("p", "div", "h1", "h2", "h3", "h4", "h5", "li", "tr", "pre", "dt", "dd", "table", "title", "br", "section")
_HIDDEN = ("script", "style", "head", "nav")
_EMPTY_LINES = re.compile(r"\n\s*\n+")


def main() -> int:
    """Write the texts."""
    options = _options()
    for kind, pages in (
        ("pydoc", module_pages()),
        ("man", manual_pages(options.manual_pages)),
        *((package, package_pages(package)) for package in options.packages),
    ):
        folder = options.folder / kind
        folder.mkdir(parents=True)
        written = 0
        for name, text in pages:
            if len(text) >= _FEWEST_CHARACTERS:
                (folder / f"{name}.txt").write_text(text, encoding="utf-8")
                written += 1
        print(f"{folder}: {written} texts", file=sys.stderr)
    return 0


def module_pages() -> Iterator[tuple[str, str]]:
    """Name and page of the standard library's public modules."""
    warnings.simplefilter("ignore")
    names = [name for name in sorted(sys.stdlib_module_names) if not name.startswith("_") and name not in _NOT_IMPORTED]
    for package in _PACKAGES_OF_MODULES:
        path = importlib.import_module(package).__path__
        names += [found.name for found in pkgutil.iter_modules(path, f"{package}.") if "._" not in found.name]
    for name in names:
        try:
            page = pydoc.render_doc(importlib.import_module(name), renderer=pydoc.plaintext)
        except ImportError:
            continue  # of another operating system
        yield name, _BAR.sub(r"\1", page)


def manual_pages(most: int) -> Iterator[tuple[str, str]]:
    """Name and text of the largest manual pages in English, Git's aside."""
    folder = Path("/usr/share/man")
    files = [file for section in _SECTIONS for file in sorted((folder / f"man{section}").glob("*.gz"))]
    files = [file for file in files if not file.is_symlink() and not file.name.startswith("git")]
    for file in sorted(files, key=lambda file: (-file.stat().st_size, file.name))[:most]:
        command = ["man", "--encoding=utf8", "--pager=cat", "--local-file", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env={"MANWIDTH": "100", "PATH": "/usr/bin:/bin"})
        if done.returncode == 0:
            yield file.name.removesuffix(".gz"), re.sub(".\b", "", done.stdout)


def package_pages(package: str) -> Iterator[tuple[str, str]]:
    """Name and text of the HTML pages of a Debian package."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, stdout=sys.stderr)
        for archive in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", archive.name, "files"], cwd=folder, check=True)
        below = Path(folder) / "files" / "usr" / "share"
        for file in sorted(below.rglob("*.html")):
            if not file.is_symlink():
                page = text_of_html(file.read_text(encoding="utf-8", errors="replace"))
                yield "-".join(file.relative_to(below).with_suffix("").parts[1:]), page


class _Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = self._preformatted = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _HIDDEN
        self._preformatted += tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in _HIDDEN
        self._preformatted -= tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))


def text_of_html(page: str) -> str:
    """The text of a page, its blocks separated by empty lines."""
    parser = _Text()
    parser.feed(page)
    return _EMPTY_LINES.sub("\n\n", "".join(parser.parts)).strip() + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder to make")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="documentation packages of Debian")
    parser.add_argument("--manual-pages", type=int, default=600, help="the most manual pages")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
