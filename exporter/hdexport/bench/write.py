"""Write the files of a benchmark."""

from __future__ import annotations

import errno
from pathlib import Path

from hdexport.bench.page.charts import write_pngs
from hdexport.bench.page.html import PAGE_FILE, write_page
from hdexport.bench.results.files import JSON_FILE, write_result
from hdexport.bench.results.result import BenchResult
from hdexport.support.redaction import redact
from hdruntime.bundle.staging import DirectoryKind
from hdruntime.errors import HdexportError


def write_results(folder: Path, result: BenchResult, *, png: bool) -> None:
    """Write ``bench.json`` and ``bench.html`` into a directory, and with `png` one picture per chart.

    The files contain no path and no identifier of this machine.
    """
    result = redact(result)
    try:
        write_result(folder / JSON_FILE, result)
        write_page(folder / PAGE_FILE, result)
        if png:
            write_pngs(folder, result)
    except OSError as error:
        path = error.filename2 or folder
        raise HdexportError(f"{path} cannot be written: {error.strerror}.", hint=_hint(error)) from error


def _hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there, or choose another directory with -o."
    return "Check that the directory exists and is writable, or choose another directory with -o."


def _other_files(folder: Path) -> list[str]:
    own = {JSON_FILE, PAGE_FILE}
    return sorted(path.name for path in folder.iterdir() if path.name not in own and path.suffix != ".png")


BENCH_DIRECTORY = DirectoryKind(
    name="directory of hdexport bench",
    marker=JSON_FILE,
    is_one=lambda folder: (folder / JSON_FILE).is_file(),
    other_files=_other_files,
)
"""Directory that `hdexport bench` may replace."""
