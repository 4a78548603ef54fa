"""Docstrings of Python's standard library: prose, dialogues, tables and drawings in letters."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

_MODULES = (
    *("argparse", "ast", "bdb", "bisect", "calendar", "codecs", "configparser", "contextlib", "copy", "csv"),
    *("datetime", "difflib", "dis", "doctest", "enum", "fileinput", "fnmatch", "fractions", "ftplib", "functools"),
    *("getopt", "gettext", "glob", "hashlib", "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox"),
    *("mimetypes", "optparse", "os", "pathlib", "pickle", "pickletools", "platform", "poplib", "pprint", "random"),
    *("sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "ssl", "stat", "statistics", "string"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback"),
    *("turtle", "typing", "uuid", "warnings", "weakref", "zipfile"),
)
"""Modules of many subjects. They are named, so that a release of Python that adds modules changes no bundle."""


def docstrings() -> list[str]:
    """The docstrings of each module, its own first, as one text; none of a module whose source is not installed."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [(library / f"{name}.py", library / name / "__init__.py") for name in _MODULES]
    found = [next((file for file in places if file.is_file()), None) for places in files]
    return [text for file in found if file is not None and (text := _docstrings(file))]


def _docstrings(file: Path) -> str:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return "\n".join(filter(None, texts))
