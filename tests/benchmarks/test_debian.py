"""Pages of Debian's packages as texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import debian

HTML = """<!DOCTYPE html><html><head><title>Chapter 3. Reading &amp; writing — The Manual documentation</title>
<style>p { color: red }</style></head><body>
<div class="navheader"><div>Prev</div> <a href="x">Next</a></div>
<h1>Reading<a class="headerlink" href="#r">¶</a></h1>
<p>A paragraph is <em>one</em> line,
whatever its source.<p>Its end may be missing.
<pre>an example

  keeps its lines</pre>
<ul class="menu"><li>Not this <ul><li>nor that</li></ul></li></ul>
<table><tr><td>a cell</td><td>another</td></tr></table>
<nav>Navigation</nav></body></html>"""


def test_the_text_of_a_page_is_its_paragraphs_without_navigation() -> None:
    title, text = debian.page_of_html(HTML)
    assert title == "Reading & writing"
    assert text.split("\n\n") == [
        "Reading",
        "A paragraph is one line, whatever its source.",
        "Its end may be missing.",
        "```\nan example\n  keeps its lines\n```",
        "a cell another",
    ]


def test_training_and_measuring_share_no_package() -> None:
    assert not set(debian.HELD_OUT) & set(debian.TRAINING)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache with two unpacked packages; nothing is downloaded."""

    def page(name: str, number: int) -> str:
        paragraphs = (f"{name} tells in paragraph {line} of what it has to tell, with words." for line in range(number))
        return f"<title>{name}</title>" + "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)

    held_out, training = tmp_path / "held-out", tmp_path / "training"
    held_out.mkdir()
    training.mkdir()
    (held_out / "a.html").write_text(page("a", 50))
    (held_out / "copy-of-a.html").write_text(page("a", 50).replace("<p>", "<div>"))
    (held_out / "known.html").write_text(page("known", 50))
    (held_out / "short.html").write_text(page("short", 10))
    (held_out / "link.html").symlink_to("a.html")
    (training / "known.html").write_text(page("known", 80))
    for package in ("held-out", "training"):
        (tmp_path / f"{package}_1.0_all.deb").touch()
    monkeypatch.setattr(debian, "HELD_OUT", {"held-out": "*.html"})
    monkeypatch.setattr(debian, "TRAINING", {"training": "*.html"})
    monkeypatch.setattr(debian, "_version", lambda archive: "1.0")
    return tmp_path


def test_held_out_pages_are_long_and_no_copies_of_each_other_or_of_training_pages(packages: Path) -> None:
    pages, versions = debian.held_out_pages(packages)
    assert [(page.name, page.title) for page in pages] == [("held-out/a.html", "a")]
    assert versions == {"held-out": "1.0"}
    assert [page.name for page in debian.training_pages(packages)[0]] == ["training/known.html"]
