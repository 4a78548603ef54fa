"""A process in which Triton interprets kernels: it takes seconds to start, so that all tests share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.interpreted_kernel import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as interpreter:
        yield interpreter
