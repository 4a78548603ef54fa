"""Debian's documentation as long texts: some packages to train with, others to measure with.

Pages have more than 2500 characters. Needs Debian 12 or a system whose apt-get offers its packages, and man-db; nothing
is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

HELD_OUT: Mapping[str, str] = {
    "apache2-doc": "usr/share/doc/apache2-doc/manual/en/**/*.html",
    "aptitude-doc-en": "usr/share/doc/aptitude/html/en/*.html",
    "bind9-doc": "usr/share/doc/bind9-doc/arm/*.html",
    "debian-faq": "usr/share/doc/debian/FAQ/*.en.html",
    "debian-kernel-handbook": "usr/share/doc/debian-kernel-handbook/kernel-handbook.html/*.html",
    "debian-policy": "usr/share/doc/debian-policy/policy.html/*.html",
    "exim4-doc-html": "usr/share/doc/exim4-doc-html/spec_html/ch-*.html",
    "harden-doc": "usr/share/doc/harden-doc/html/en-US/*.html",
    "installation-guide-amd64": "usr/share/doc/installation-guide-amd64/en/*.html",
    "krb5-doc": "usr/share/doc/krb5-doc/*/*.html",
    "libvirt-doc": "usr/share/doc/libvirt-doc/html/**/*.html",
    "postfix-doc": "usr/share/doc/postfix/html/*.html",
    "sqlite3-doc": "usr/share/doc/sqlite3/*.html",
    "varnish-doc": "usr/share/doc/varnish/html/**/*.html",
}
"""Package -> its pages, for measuring. Nothing is tuned on them."""

TRAINING: Mapping[str, str] = {
    "coreutils": "usr/share/man/man1/*.gz",
    "debian-reference-en": "usr/share/debian-reference/*.html",
    "developers-reference": "usr/share/developers-reference/*.html",
    "git-doc": "usr/share/doc/git-doc/**/*.html",
    "manpages": "usr/share/man/man*/*.gz",
    "manpages-dev": "usr/share/man/man*/*.gz",
    "postgresql-doc-15": "usr/share/doc/postgresql-doc-15/html/*.html",
}
"""Package -> its pages, for training."""

_SHORTEST_CHARACTERS = 2500
"""Shorter pages have fewer than 512 tokens."""

_FEWEST_WORDS = 10
_MOST_REPEATED = 0.1
"""Share of a held-out page's paragraphs that may occur in training pages: licences and notices do."""

_BLOCK = re.compile(
    "address|article|blockquote|body|caption|center|dd|details|div|dl|dt|fieldset|figure|h[1-6r]|li|main|ol|p|pre|section|"
    "summary|table|tr|ul"
)
_DROPPED = re.compile("aside|button|footer|form|nav|noscript|script|select|style|svg")
_NAVIGATION = re.compile(
    "contents|fancy_toc|footer|headerlink|indexterm|linkbar|menu|nav|navfooter|navheader|navigation|next_page|nosearch|"
    "page-header|path|permalink|prev_next|previous_page|related|searchmenu|seealso|sphinxsidebar|submenu|toc|top|topbar"
)
"""Words of an element's class, id or role that say it is not the page's own text."""

_FRAME = re.compile(
    r"^(?:(?:Chapter|Appendix|Part)\s+)?(?:\d+|[A-Z])(?:\.\d+)*\.\s+"
    r"|\s+[—-]\s+[^—]*(?:[Dd]ocumentation|Version 2\.4|Manual v[\d.]+)$"
)
"""Parts that titles of pages share: numbers of chapters, names of manuals."""


@dataclass(frozen=True)
class Page:
    """A page of a manual.

    Attributes:
        name: package and path, unique.
        title: of the page, for people.
        text: paragraphs, with empty lines between them; examples are fenced by three backquotes.
    """

    name: str
    title: str
    text: str


def held_out_pages(cache: Path) -> tuple[list[Page], dict[str, str]]:
    """The long pages to measure with, and the packages' versions; pages that repeat a training page are left out."""
    pages, versions = _pages(HELD_OUT, cache)
    known = {paragraph for page in training_pages(cache)[0] for paragraph in _paragraphs(page.text)}
    return [page for page in pages if not _repeats(page, known)], versions


def training_pages(cache: Path) -> tuple[list[Page], dict[str, str]]:
    """The long pages to train with, and the packages' versions.

    Args:
        cache: a folder that keeps downloaded packages.
    """
    return _pages(TRAINING, cache)


def _pages(packages: Mapping[str, str], cache: Path) -> tuple[list[Page], dict[str, str]]:
    pages: dict[tuple[str, ...], Page] = {}
    versions = {}
    for package, pattern in packages.items():
        root, versions[package] = _unpacked(package, cache)
        for file in sorted(root.glob(pattern)):
            if file.is_symlink():
                continue
            page = _page_of_file(file, f"{package}/{file.relative_to(root)}")
            if len(page.text) > _SHORTEST_CHARACTERS:
                pages.setdefault(tuple(_paragraphs(page.text)), page)
    return list(pages.values()), versions


def _paragraphs(text: str) -> list[str]:
    """Paragraphs of at least ten words, without distinction of spaces and line ends."""
    paragraphs = (paragraph.split() for paragraph in text.split("\n\n"))
    return [" ".join(words) for words in paragraphs if len(words) >= _FEWEST_WORDS]


def _repeats(page: Page, known: set[str]) -> bool:
    paragraphs = _paragraphs(page.text)
    return sum(paragraph in known for paragraph in paragraphs) > _MOST_REPEATED * len(paragraphs)


def _unpacked(package: str, cache: Path) -> tuple[Path, str]:
    """The package's files and its version; files in the cache are not downloaded again."""
    cache.mkdir(parents=True, exist_ok=True)
    if not (archives := sorted(cache.glob(f"{package}_*.deb"))):
        subprocess.run(["apt-get", "download", f"{package}/bookworm"], cwd=cache, check=True, stdout=subprocess.DEVNULL)
        archives = sorted(cache.glob(f"{package}_*.deb"))
    archive, root = archives[-1], cache / package
    if not root.exists():
        partial = cache / f"{package}.partial"
        subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
        partial.rename(root)
    return root, _version(archive)


def _version(archive: Path) -> str:
    shown = subprocess.run(["dpkg-deb", "-f", archive, "Version"], check=True, capture_output=True, text=True)
    return shown.stdout.strip()


def _page_of_file(file: Path, name: str) -> Page:
    if file.suffix == ".gz":
        return Page(name, file.name.split(".")[0], _man_page(file))
    title, text = page_of_html(file.read_text(encoding="utf-8", errors="replace"))
    return Page(name, title, text)


def _man_page(file: Path) -> str:
    kept = file.with_suffix(".txt")
    if not kept.exists():
        kept.write_text(_formatted(file), encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def _formatted(file: Path) -> str:
    environment = os.environ | {"MANWIDTH": "100", "LC_ALL": "C.UTF-8"}
    command = ["man", "--local-file", "--no-hyphenation", "--no-justification", str(file)]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    # The first and last lines are the page's name and date.
    return "\n".join(shown.stdout.strip().splitlines()[1:-1]).strip("\n")


def page_of_html(html: str) -> tuple[str, str]:
    """The title and text of a page, without navigation."""
    parser = _PageParser()
    parser.feed(html)
    parser.close()
    return _FRAME.sub("", " ".join(parser.title.split())), "\n\n".join(parser.paragraphs())


class _PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self._parts: list[tuple[bool, str]] = []  # whether it is an example, text
        self._left_out: list[str] = []  # the tag left out, once for each element of that tag within it
        self._is_title = self._is_example = False

    def paragraphs(self) -> Iterator[str]:
        self._break()
        text, examples = "", False
        for is_example, part in self._parts:
            if part == "\n\n":
                if text.strip():
                    yield _fenced(text) if examples else " ".join(text.split())
                text = ""
            else:
                text, examples = text + part, is_example

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._left_out:
            if tag == self._left_out[-1]:
                self._left_out.append(tag)
        elif _DROPPED.fullmatch(tag) or any(map(_NAVIGATION.fullmatch, _words(attrs))):
            self._left_out.append(tag)
        elif tag == "title":
            self._is_title = not self.title
        elif _BLOCK.fullmatch(tag):
            self._break()
            self._is_example = tag == "pre"
        elif tag in ("br", "td", "th"):
            self._parts.append((self._is_example, "\n"))

    def handle_endtag(self, tag: str) -> None:
        if self._left_out:
            if tag == self._left_out[-1]:
                self._left_out.pop()
        elif tag == "title":
            self._is_title = False
        elif _BLOCK.fullmatch(tag):
            self._break()
            self._is_example = False

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self.title += data
        elif not self._left_out:
            # One line end in an example is not the end of a paragraph.
            self._parts.append((self._is_example, re.sub(r"\n\s*\n", "\n", data) if self._is_example else data))

    def _break(self) -> None:
        self._parts.append((False, "\n\n"))


def _words(attrs: list[tuple[str, str | None]]) -> list[str]:
    return [word.lower() for name, value in attrs if name in ("class", "id", "role") for word in (value or "").split()]


def _fenced(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(["```", *lines, "```"])


def cache_folder() -> Path:
    """The folder where packages are kept unless another one is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hdexport-benchmarks" / "debian"
