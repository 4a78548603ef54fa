"""A Griffe extension for the site: what docstrings have of reStructuredText becomes Markdown."""

from __future__ import annotations

__all__ = ["DocstringRoles"]

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
"""As in ``:meth:`Session.embed` ``; the last name is kept."""

_LITERAL_BLOCK = re.compile(r"(?m)^( *)(\S.*)?::$")
"""Before an indented block, which Markdown shows as code without it."""


class DocstringRoles(griffe.Extension):
    """Rewrites docstrings when they are collected."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            value = _ROLE.sub(r"`\1`", obj.docstring.value)
            value = _LITERAL_BLOCK.sub(lambda m: f"{m[1]}{m[2]}:" if m[2] else "", value)
            # Two shapes in a row, [texts][dimensions], are no link.
            obj.docstring.value = value.replace("][", "]\\[")
