"""The figures of a corpus, and their file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from hdexport.support.published import published
from hdruntime.bundle.checked_json import json_from_dataclass
from hdruntime.bundle.staging import DirectoryKind
from hdruntime.whole_files import write_whole

CORPUS_FILE = "corpus.json"

CORPUS_DIRECTORY = DirectoryKind(
    name="benchmark of a corpus",
    marker=CORPUS_FILE,
    is_one=lambda directory: (directory / CORPUS_FILE).is_file(),
    foreign_files=lambda directory: sorted(path.name for path in directory.iterdir() if path.name != CORPUS_FILE),
)
"""The output of `hdexport bench --corpus`."""


@dataclass(frozen=True, kw_only=True)
class CorpusSeries:
    """One way to embed the corpus.

    Attributes:
        name: of the bundle with its backend and precision, or of the peer.
        batch_size: texts per batch; None for a bundle, whose batches are of tokens.
        is_default: whether the batch size is the library's own; otherwise it is the best one that was found.
        remark: how its computation differs from the bundle's.
        unavailable: why it did not run; None if it did.
        seconds: of each round.
        tokens: of the texts with special tokens, cut where the bundle ends.
        computed_tokens: the same with padding.
        peak_bytes: peak resident memory of its process and all that the process started.
        max_abs_error: largest difference of a number of its vectors from sentence-transformers' in float32; None if
            that did not run.
    """

    name: str
    is_peer: bool
    batch_size: int | None = None
    is_default: bool = True
    remark: str | None = None
    unavailable: str | None = None
    seconds: tuple[float, ...] = ()
    tokens: int = 0
    computed_tokens: int = 0
    peak_bytes: int = 0
    max_abs_error: float | None = None

    @property
    def title(self) -> str:
        """The name, with a peer's batch size."""
        return self.name if self.batch_size is None else f"{self.name}, batch {self.batch_size}"

    @property
    def padding(self) -> float:
        """Padding as a share of the computed tokens, 0 to 1."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class CorpusResult:
    """A benchmark of one corpus.

    Attributes:
        date: of the start, ISO 8601.
        corpus: name of the sample, or the file.
        texts: number of texts.
        lengths: tokens of the shortest, the median and the longest text, cut where the bundle ends.
        rounds: processes per series.
    """

    schema_version: int = 1
    date: str
    command: str
    environment: dict[str, str]
    corpus: str
    texts: int
    lengths: tuple[int, int, int]
    rounds: int
    series: tuple[CorpusSeries, ...]


def write_corpus_result(folder: Path, result: CorpusResult) -> None:
    """Writes `CORPUS_FILE` into a folder, whole or not at all, without paths and identifiers of this machine."""
    write_whole(folder / CORPUS_FILE, json_from_dataclass(published(result)))
