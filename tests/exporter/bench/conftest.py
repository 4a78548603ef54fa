"""Fixtures of the tests of `hdexport bench`."""

from support.bench_workshop import shallow, workshop  # noqa: F401 fixtures
