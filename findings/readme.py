"""Writes README.md of this folder from the comments on top of its scripts: python findings/readme.py"""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
FIELDS = ("Library", "Guess", "Happens", "Minded", "Seen")
HEAD = """# Findings

What real libraries do that we guessed wrong, as programs that anyone can run: each installs pinned public packages into
a temporary folder, runs them without hdexport, prints what it sees, and exits 0 while that is so. `make findings` runs
all of them and lists those that changed. `python findings/readme.py` writes this page from the comments on top.

| Library | One would guess | What happens | Minded in | Seen |
|---|---|---|---|---|
"""


def fields(script: str) -> dict[str, str]:
    """The fields of the comment on top: `# Name: text`, and further lines of it indented by two spaces."""
    found: dict[str, str] = {}
    for line in script.splitlines()[1:]:
        if field := re.fullmatch(r"# ([A-Z][a-z]+): (.+)", line):
            name = field[1]
            found[name] = field[2]
        elif more := re.fullmatch(r"#   (\S.*)", line):
            found[name] += f" {more[1]}"
        else:
            break
    if tuple(found) != FIELDS:
        raise ValueError(f"a comment on top has {', '.join(found)} in place of {', '.join(FIELDS)}")
    return found


def _linked(minded: str) -> str:
    """Paths in the repository as links."""
    return re.sub(r"[\w/]+\.py", lambda path: f"[{Path(path[0]).name}](../{path[0]})", minded)


def page() -> str:
    """The page."""
    rows = []
    for script in sorted(FOLDER.glob("*.sh")):
        found = {name: text.replace("|", "\\|") for name, text in fields(script.read_text(encoding="utf-8")).items()}
        cells = (
            f"[{found['Library']}]({script.name})",
            found["Guess"],
            found["Happens"],
            _linked(found["Minded"]),
            found["Seen"],
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")
