"""Writes a benchmark's files."""

from __future__ import annotations

import errno
from pathlib import Path

from hdexport.bench.page.html import PAGE_FILE, write_page
from hdexport.bench.results.files import CSV_FILE, JSON_FILE, write_csv, write_result
from hdexport.bench.results.result import BenchResult
from hdexport.support.published import published
from hdruntime.bundle.staging import DirectoryKind
from hdruntime.errors import HdexportError


def write_results(folder: Path, result: BenchResult, *, png: bool) -> None:
    """Writes ``bench.json``, ``bench.csv`` and ``bench.html`` into a folder, and with `png` one picture per chart. The
    files name no path and no identifier of this machine."""
    result = published(result)
    try:
        write_result(folder / JSON_FILE, result)
        write_csv(folder / CSV_FILE, result)
        write_page(folder / PAGE_FILE, result)
        if png:
            from hdexport.bench.page.charts import write_pngs

            write_pngs(folder, result)
    except OSError as error:
        where = error.filename2 or folder
        raise HdexportError(f"{where} cannot be written: {error.strerror}.\n{_advice(error)}") from error


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there, or choose another folder with -o."
    return "Check that the folder exists and is writable, or choose another with -o."


def _foreign_files(folder: Path) -> list[str]:
    ours = {JSON_FILE, CSV_FILE, PAGE_FILE}
    return sorted(path.name for path in folder.iterdir() if path.name not in ours and path.suffix != ".png")


BENCH_DIRECTORY = DirectoryKind(
    name="directory of hdexport bench",
    marker=JSON_FILE,
    is_one=lambda folder: (folder / JSON_FILE).is_file(),
    foreign_files=_foreign_files,
)
"""The kind of directory that `hdexport bench --force` may replace."""
