"""The cases that the benchmark measures, and their kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.cpu.feeding.inputs import BUNDLES

WHAT = ("cpu", "share", "batches", "serve", "cores", "stages")
SIMILARITY = BUNDLES[0]

JOB, EMBED, ENCODE = "job", "embed", "encode"
JOBS = ("jsonl-parquet", "csv-parquet", "parquet-parquet", "jsonl-jsonl")
TOKENIZERS = ("encode_batch", "encode_batch_fast")
PEER = "sentence-transformers"
TEXTS_OF_A_REQUEST = (1, 32)

LABELS = {
    **{way: "job, {} to {}".format(*way.split("-")) for way in JOBS},
    EMBED: "`Session.embed`",
    ENCODE: "`SentenceEncoder.encode`",
    **{way: f"`{way}` alone" for way in TOKENIZERS},
    PEER: "sentence-transformers' preparation",
}


class Case(NamedTuple):
    """A case, which one process measures.

    Attributes:
        what: of `WHAT`.
        way: what is called.
    """

    what: str
    bundle: str
    corpus: str
    way: str

    def __str__(self) -> str:
        return " ".join(self)


class Settings(NamedTuple):
    """The settings that all cases share.

    Attributes:
        folder: of bundles and corpora.
        bundle: that runs on this machine in the place of those; None for the stand-in.
        timeline: the picture that is drawn of a job; None for none.
    """

    folder: str
    repeats: int
    tokens_per_second: float
    in_flight: int
    bundle: str | None = None
    timeline: str | None = None

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)


def cases_of(what: str, bundles: Sequence[str], corpora: Sequence[str]) -> Iterator[Case]:
    """The cases of a kind."""
    ways: Mapping[str, Sequence[str]] = {
        "cpu": (*JOBS, EMBED, ENCODE, *TOKENIZERS, PEER),
        "share": (JOB, ENCODE),
        "batches": (JOB, EMBED),
        "serve": tuple(map(str, TEXTS_OF_A_REQUEST)),
        "cores": (JOB,),
        "stages": (JOB,),
    }
    for corpus in corpora:
        if SIMILARITY in bundles or what != "cpu":
            yield from (Case(what, SIMILARITY, corpus, way) for way in ways[what])
        for bundle in bundles:
            if what == "cpu" and bundle != SIMILARITY:
                yield Case(what, bundle, corpus, "jsonl-parquet")
                # A text of a thousand tokens has a megabyte of numbers.
                if bundle != "token-vectors" or corpus == "short":
                    yield Case(what, bundle, corpus, "jsonl-jsonl")
