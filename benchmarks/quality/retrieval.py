"""What longer positions do to retrieval of long documents by a real model: schemes, windows, chunks, tuned checkpoints.

Usage: python -m benchmarks.quality.retrieval [--corpus python] [--variants 'tile*' truncated] [--tuned DIR ...] -o FILE

With `--runner openvino` the question is another one: what bfloat16 and int8 do to it.

Documents have more tokens than all-MiniLM-L6-v2 was trained with, 512. A query has one right document among all of
its corpus, and its rank counts. There are three kinds, as in `hdexport quality`:

* name: the document's title, which its first 512 tokens mostly repeat;
* first: its first sentence, taken out of the document;
* later: sentences from after its 512th token, taken out of it: a model that reads 512 tokens never sees them.

Every finished variant is a line of FILE, with the rank of every query; variants that FILE has are not run again, so the
command may be stopped and repeated. `python -m benchmarks.quality.tables FILE` shows the results.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

import hdruntime
from benchmarks.quality.corpora import CORPORA
from benchmarks.quality.debian import cache_folder
from benchmarks.quality.results import PRECISIONS_RUNNER, Line, read_lines
from benchmarks.record import append, command_line, now
from benchmarks.texts import tokenizer_of
from hdexport.bench.measure.calls import environment
from hdexport.cli.progress import StatusLine
from hdexport.quality.encoding import LongTextMode, similarities_by_mode, vectors_of
from hdexport.quality.measurement import CUTOFF, ranks_of
from hdexport.quality.queries import Collection, collection_of, unread_from
from hdexport.support.redaction import redact
from hdruntime.arrays import FloatingArray
from hdruntime.text.similarity import similarities
from hdruntime.text.splitting import split_encodings

if TYPE_CHECKING:
    from hdexport.checkpoint import Checkpoint
    from hdruntime.bundle.manifest import AttentionScale
    from hdruntime.session import Session

SCHEMES = (
    *(("hierarchical", alpha) for alpha in (0.02, 0.05, 0.1, 0.2, 0.4)),
    *((scheme, None) for scheme in ("tile", "interpolate", "interpolate:static", "group")),
)
"""Scheme, and alpha of the hierarchical one."""

TRIED_FURTHER = (("hierarchical", 0.05), ("tile", None), ("interpolate", None))
"""The schemes with windows and in chunks, too."""

CHUNK = 256
"""Tokens of a chunk, of which the best counts for its document."""

WITHOUT_CALIBRATION = "int8 without calibration"
"""The int8 of large models, which OpenVINO quantizes while it runs, for a model of any size."""

PRECISIONS = ("float32", "bfloat16", "int8", WITHOUT_CALIBRATION)
"""Precisions in OpenVINO, the baseline first."""

_PACKAGES = ("hdexport", "torch", "transformers", "onnxruntime", "openvino", "numpy", "python")


@dataclass(frozen=True)
class Variant:
    """A bundle and how documents are fed to it.

    Attributes:
        reading: a `LongTextMode`; ``late``: the document is read whole and each chunk has a vector; ``chunks``: each
            chunk is read by itself.
        scheme: positions past the trained ones; ``none`` for a bundle of the checkpoint's own length.
        alpha: of hierarchical positions.
        log_n: whether queries of attention are scaled.
        window: tokens on each side that attention sees; None for all.
        checkpoint: a tuned checkpoint; None for the model itself.
        precision: one of `PRECISIONS`.
    """

    reading: str = LongTextMode.WHOLE.value
    scheme: str = "none"
    alpha: float | None = None
    log_n: bool = False
    window: int | None = None
    checkpoint: str | None = None
    precision: str = "float32"

    @property
    def name(self) -> str:
        """The variant's name in tables."""
        return self._name_in_float32 + (f", {self.precision}" if self.precision != "float32" else "")

    @property
    def _name_in_float32(self) -> str:
        if self.checkpoint is not None:
            positions = f"tuned: {Path(self.checkpoint).name}"
        elif self.scheme == "none":
            return {"chunks": f"chunks:{CHUNK}, the best"}.get(self.reading, self.reading)
        else:
            positions = self.scheme if self.alpha is None else f"{self.scheme} {self.alpha:g}"
        parts = [positions]
        parts += ["log-n"] if self.log_n else []
        parts += [f"window:{self.window}"] if self.window else []
        parts += [f"late chunks:{CHUNK}, the best"] if self.reading == "late" else []
        return ", ".join(parts)


def main() -> int:
    """Run the variants that the output lacks."""
    options = _options()
    from hdexport.checkpoint import default_model, find_checkpoint

    checkpoint = find_checkpoint(options.model or default_model()[0])
    chosen = [each for each in variants(options) if any(fnmatch.fnmatch(each.name, it) for it in options.variants)]
    if options.list:
        print("\n".join(variant.name for variant in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for corpus in options.corpus:
            _run_corpus(corpus, chosen, checkpoint, Path(folder), options)
    return 0


def variants(options: argparse.Namespace) -> list[Variant]:
    """The variants to compare, the baseline first."""
    if options.runner == PRECISIONS_RUNNER:
        whole = Variant(scheme="hierarchical", alpha=0.05, log_n=True)
        return [
            replace(variant, precision=precision)
            for variant in (Variant("truncated"), Variant("split"), whole)
            for precision in PRECISIONS
        ]
    plain = [Variant(scheme=scheme, alpha=alpha, log_n=log_n) for scheme, alpha in SCHEMES for log_n in (False, True)]
    # Without log-n: a window of 256 on each side sees no more keys than were trained.
    windowed = [Variant(scheme=scheme, alpha=alpha, window=options.window) for scheme, alpha in TRIED_FURTHER]
    late = [Variant("late", scheme=scheme, alpha=alpha, log_n=True) for scheme, alpha in TRIED_FURTHER]
    tuned = [Variant(reading, checkpoint=str(each)) for reading in ("whole", "late") for each in options.tuned]
    return [Variant("truncated"), Variant("split"), *plain, *windowed, Variant("chunks"), *late, *tuned]


def _run_corpus(
    name: str, chosen: Sequence[Variant], checkpoint: Checkpoint, folder: Path, options: argparse.Namespace
) -> None:
    trained = checkpoint.base_positions
    tokenizer = tokenizer_of(checkpoint.path / "tokenizer.json")
    corpus = CORPORA[name](options.cache, lambda texts: list(map(len, tokenizer.encode_batch(texts))), trained=trained)
    texts = dict(itertools.islice(corpus.texts.items(), options.documents))
    encoded = tokenizer.encode_batch(list(texts.values()))
    collection = collection_of(
        list(texts.values()),
        unread=unread_from([each.offsets for each in encoded], trained),
        names=list(texts),
        sentences=options.sentences,
    )
    machine = environment()
    lengths = sorted(map(len, encoded))
    median = lengths[len(lengths) // 2]
    facts = {
        "corpus": name,
        "digest": _digest(collection),
        "model": checkpoint.name,
        "max_len": options.max_len,
        "runner": options.runner,
    }
    done = {Variant(**line.build) for line in read_lines(options.output) if asdict(line.facts) == facts}
    # Results have no paths of a machine: a tuned checkpoint is known by the name of its folder.
    missing = [each for each in chosen if Variant(**redact(asdict(each))) not in done]
    print(
        f"{name}: {len(lengths)} documents, median {lengths[len(lengths) // 2]} tokens; {len(missing)} variants to run"
    )
    for variant in missing:
        began = time.perf_counter()
        bundle = _bundle_of(variant, checkpoint, folder, options)
        with StatusLine() as status, _session(bundle, variant, checkpoint, options) as session:
            status.begin(variant.name)
            ranks = _ranks(session, variant, collection, trained, status)
        line = {
            "benchmark": "quality",
            "date": now(),
            "command": command_line("benchmarks.quality.retrieval"),
            "commit": machine.get("commit"),
            "cpu": machine.get("cpu"),
            "versions": {package: machine[package] for package in _PACKAGES} | corpus.versions,
            "facts": facts,
            "documents": len(lengths),
            "tokens": {"median": median, "longest": lengths[-1], "all": sum(lengths)},
            "variant": variant.name,
            "build": asdict(variant),
            "seconds": round(time.perf_counter() - began, 1),
            "ranks": ranks,
        }
        append(options.output, line)
        print(Line.of(line).summary(), flush=True)


def _bundle_of(variant: Variant, checkpoint: Checkpoint, folder: Path, options: argparse.Namespace) -> Path:
    """Build a variant, unless another has built the same; graphs are compared with PyTorch by the tests, not here."""
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint.extended_files import read_extension
    from hdexport.quantize import Int8Options, bundle
    from hdruntime.bundle.manifest import Scheme

    # One bundle has all precisions but int8.
    int8 = variant.precision if variant.precision.startswith("int8") else None
    built = {name: value for name, value in asdict(variant).items() if name not in ("reading", "precision")}
    built["int8"] = int8
    path = folder / hashlib.sha256(repr(built).encode()).hexdigest()
    if path.exists():
        return path
    source = _source(variant, checkpoint)
    extension = read_extension(source.config, source.path / "config.json")
    attention = None if variant.window is None else f"window:{variant.window}"
    scale: AttentionScale | None = "logn" if variant.log_n else "none"
    if extension is not None:  # as it was trained
        attention, scale = extension.attention, None
    in_openvino = options.runner == PRECISIONS_RUNNER
    build_options = BuildOptions(
        model=source,
        output=path,
        max_len=source.base_positions if variant.scheme == "none" else options.max_len,
        scheme=Scheme(variant.scheme),
        alpha=variant.alpha,
        attention_scale=scale,
        attention=attention_from_spec(attention),
        targets=("openvino",) if in_openvino else (),
        int8=None if int8 is None else Int8Options(),
        verify=None,
    )
    with mock.patch.object(bundle, "MIN_PARAMETERS", 0 if int8 == WITHOUT_CALIBRATION else bundle.MIN_PARAMETERS):
        build(build_options)
    return path


def _source(variant: Variant, checkpoint: Checkpoint) -> Checkpoint:
    from hdexport.checkpoint import find_checkpoint

    return checkpoint if variant.checkpoint is None else find_checkpoint(variant.checkpoint)


def _session(bundle: Path, variant: Variant, checkpoint: Checkpoint, options: argparse.Namespace) -> Session:
    if options.runner in ("onnxruntime", PRECISIONS_RUNNER):
        precision = variant.precision.partition(" ")[0]
        settings = {"threads": options.threads, "precision": precision, "max_seq_length": "bundle"}
        return hdruntime.load(bundle, backend=options.runner, **settings)
    import torch

    from benchmarks.quality.pytorch_runner import PyTorchRunner
    from hdexport.verify.pytorch_reference import reference_of
    from hdruntime.bundle.reader import open_bundle

    if options.threads:
        torch.set_num_threads(options.threads)
    opened = open_bundle(bundle)
    reference = reference_of(opened, _source(variant, checkpoint))
    return hdruntime.Session(opened, PyTorchRunner(reference, max_len=opened.manifest.max_len))


def _ranks(
    session: Session, variant: Variant, collection: Collection, trained: int, status: StatusLine
) -> dict[str, list[list[int]]]:
    """Kind -> of each document that is asked for, the ranks of its queries; 0 after the cutoff."""

    def begin(tokens: int) -> None:
        status.begin(variant.name, total=tokens)

    if variant.reading in tuple(LongTextMode):
        mode = LongTextMode(variant.reading)
        found = similarities_by_mode(session, collection, trained=trained, modes=[mode], begin=begin, line=status)[mode]
    else:
        found = _best_of_chunks(session, collection, variant.reading, begin, status)
    return {
        kind: _by_document(ranks_of(found[kind], queries.answers), queries.answers)
        for kind, queries in collection.queries.items()
    }


def _best_of_chunks(
    session: Session, collection: Collection, reading: str, begin: Callable[[int], None], status: StatusLine
) -> dict[str, FloatingArray]:
    """Kind -> [queries, documents], the similarity of each document's best chunk."""
    if reading == "late":
        of_documents = session.embed_chunks(collection.documents, chunks=f"tokens:{CHUNK}")
        vectors = np.concatenate([chunks.vectors for chunks in of_documents])
        counts = [len(chunks.vectors) for chunks in of_documents]
    else:
        wholes = [document.whole for document in session.split(collection.documents)]
        # Beside its own tokens a chunk has the two special ones.
        splits = split_encodings(wholes, max_len=CHUNK + 2, stride=0, is_pair=False)
        counts = [len(split.chunks) for split in splits]
        chunks = [chunk for split in splits for chunk in split.chunks]
        vectors = vectors_of(session, chunks, begin=begin, line=status)
    starts = np.cumsum([0, *counts[:-1]])
    return {
        kind: np.maximum.reduceat(similarities("cosine", session.embed(queries.texts), vectors), starts, axis=1)
        for kind, queries in collection.queries.items()
    }


def _by_document(ranks: FloatingArray, answers: Sequence[int]) -> list[list[int]]:
    kept = np.where(ranks <= CUTOFF, ranks, 0).astype(int)
    return [kept[np.array(answers) == answer].tolist() for answer in dict.fromkeys(answers)]


def _digest(collection: Collection) -> str:
    """Equal for equal documents and queries: only their ranks can be compared."""
    content = json.dumps([collection.documents, {kind: asdict(each) for kind, each in collection.queries.items()}])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a sentence-transformers checkpoint (default: the sample model)")
    parser.add_argument("--corpus", nargs="+", choices=list(CORPORA), default=list(CORPORA), help="documents")
    parser.add_argument(
        "--variants", nargs="+", default=["*"], metavar="GLOB", help="names of variants, as --list prints"
    )
    parser.add_argument("--list", action="store_true", help="print the variants' names and run nothing")
    parser.add_argument("--tuned", nargs="+", default=[], type=Path, metavar="DIR", help="tuned checkpoints")
    parser.add_argument("--max-len", type=int, default=4096, help="tokens of the extended models")
    parser.add_argument("--window", type=int, default=256, help="tokens on each side, of the windowed variants")
    parser.add_argument("--documents", type=int, help="documents of each corpus, the first ones (default: all)")
    parser.add_argument("--sentences", type=int, default=4, help="later sentences per document")
    parser.add_argument(
        "--runner",
        choices=["onnxruntime", PRECISIONS_RUNNER, "pytorch-bfloat16"],
        default="onnxruntime",
        help="the bundle in ONNX Runtime, or in OpenVINO in each precision, or its model in PyTorch in bfloat16, fast "
        "on processors with AMX",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: the runner's choice)")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder that keeps Debian's packages")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of JSON lines that results are added to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
