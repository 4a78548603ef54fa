"""The effect of reading long texts whole on retrieval with a user's bundles and texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from statistics import median

import numpy as np

from hdexport.quality.encoding import LongTextMode, ProgressLine, similarities_by_mode
from hdexport.quality.queries import Collection, collection_of, unread_from
from hdexport.support.texts import NamedText
from hdruntime.arrays import FloatingArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputError, Setting
from hdruntime.session import Session, load
from hdruntime.text.encoding import Overflow
from hdruntime.text.pooling import embedding_output
from hdruntime.text.tokenization import TextTokenizer

_FEWEST_TEXTS, _FEWEST_SENTENCES = 5, 10
"""Long texts, and sentences after the trained positions: an interval of fewer says nothing."""

_QUERY_KINDS = {"later": "later sentences", "first": "first sentences", "name": "texts by their names"}
_NUMBERED = re.compile(r":\d+$")
_WORD = re.compile(r"[^\W\d_]{3,}")

CUTOFF = 10
"""Documents of a ranking that count."""

_RESAMPLES = 10_000

_RESAMPLES_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class Score:
    """The mean reciprocal rank, MRR@10, of one kind of query with a bundle and a mode of long texts. The
    `difference`, paired by query, is that from texts truncated to the trained positions, with the first bundle."""

    bundle: str
    precision: Precision
    mode: LongTextMode
    kind: str
    mrr: Mean
    difference: Mean


@dataclass(frozen=True, kw_only=True)
class QualityResult:
    """The result of a measurement.

    Attributes:
        trained: positions of the truncated texts and of chunks.
        texts: number of documents that were searched.
        long_texts: number of documents of more tokens than `trained`.
        median_tokens: median number of tokens of the long texts.
        truncated_texts: bundle -> number of texts that are longer than it takes, and were cut there.
        queries: kind -> number.
        scores: the scores of each bundle, mode and kind that has queries.
    """

    trained: int
    texts: int
    long_texts: int
    median_tokens: int
    longest_tokens: int
    truncated_texts: dict[str, int]
    queries: dict[str, int]
    scores: tuple[Score, ...]


def measure_quality(
    bundles: Sequence[Path],
    texts: Sequence[NamedText],
    *,
    sentences: int,
    trained: int | None,
    backend: str,
    precision: Precision = Precision.AUTO,
    line: ProgressLine,
) -> QualityResult:
    """Retrieval of long texts by their own sentences, for each bundle and mode to read them.

    Args:
        bundles: one or more bundles of one model.
        texts: all are searched; texts of more than `trained` tokens are asked for.
        sentences: the most later sentences of a text.
        trained: positions that texts are truncated to and split at; None for those of the bundles' models.
        precision: the precision that it computes in on a CPU.
    """
    line.begin("Reading the texts")
    opened = [open_bundle(path) for path in bundles]
    tokenizer = _tokenizer(opened)
    if trained is None:
        positions = ((each.manifest.positions, each.manifest.max_len) for each in opened)
        trained = min(min(each.trained or each.base, max_len) for each, max_len in positions)
    offsets = [
        encoding.offsets for encoding in tokenizer.encode([text.text for text in texts], overflow=Overflow.SPLIT)
    ]
    lengths = [len(of_text) for of_text in offsets]
    long = [length for length in lengths if length > trained]
    if len(long) < _FEWEST_TEXTS:
        raise InputError(
            f"{len(long)} of {len(texts)} texts have more than {trained} tokens, which the model was trained with; "
            f"at least {_FEWEST_TEXTS} are needed.",
            hint=("Name more long texts with ", Setting("texts"), "."),
        )
    collection = collection_of(
        [text.text for text in texts],
        unread=unread_from(offsets, trained),
        names=[_words_of_name(text.name) for text in texts],
        sentences=sentences,
    )
    if (found := len(collection.queries["later"].texts)) < _FEWEST_SENTENCES:
        raise InputError(
            f"{found} sentences of 8 to 60 words were found after the first {trained} tokens of {len(long)} long "
            f"texts; at least {_FEWEST_SENTENCES} are needed.",
            hint=("Name more texts of prose with ", Setting("texts"), "."),
        )
    load_one = functools.partial(load, backend=backend, precision=precision)
    scores = _scores(opened, collection, trained=trained, load_one=load_one, line=line)
    return QualityResult(
        trained=trained,
        texts=len(texts),
        long_texts=len(long),
        median_tokens=int(median(long)),
        longest_tokens=max(long),
        truncated_texts={str(each.path): sum(length > each.manifest.max_len for length in lengths) for each in opened},
        queries={kind: len(queries.texts) for kind, queries in collection.queries.items() if queries.texts},
        scores=tuple(scores),
    )


def findings(result: QualityResult) -> Iterator[str]:
    """The change by whole texts, one sentence per bundle and kind of query; kinds that truncation cannot answer come
    first."""
    for kind, what in _QUERY_KINDS.items():
        for score in result.scores:
            if (score.kind, score.mode) != (kind, LongTextMode.WHOLE):
                continue
            bundle = f"{score.bundle}: " if len(result.truncated_texts) > 1 else ""
            if score.difference.low > 0 or score.difference.high < 0:
                verdict = "better" if score.difference.low > 0 else "worse"
                yield f"{bundle}whole texts find {what} {verdict} than truncation: {score.difference}"
            else:
                number = result.queries[kind]
                yield f"{bundle}whole texts and {what}: no difference shown by {number} queries: {score.difference}"


def _tokenizer(bundles: Sequence[Bundle]) -> TextTokenizer:
    """The first bundle's tokenizer; rejects bundles that cannot be compared by it."""
    first = bundles[0]
    for bundle in bundles:
        embedding_output(bundle.manifest)  # rejects bundles without vectors
        if bundle.manifest.tokenizer is None:
            raise InputError(
                f"The bundle {bundle.path} has no tokenizer.", hint="Build it again of a checkpoint that has one."
            )
        if _model(bundle.manifest) != _model(first.manifest):
            raise InputError(
                f"{bundle.path} is of another model than {first.path}: {bundle.manifest.name} "
                f"({bundle.manifest.parameters:,} parameters), not {first.manifest.name} "
                f"({first.manifest.parameters:,}).",
                hint="Measure each by itself.",
            )
    return TextTokenizer.of(first, max_len=first.manifest.max_len)


def _model(manifest: Manifest) -> tuple[object, ...]:
    """Equal for bundles of one model, with any positions and precision, tuned or not."""
    return manifest.model_type, manifest.vocab_size, manifest.num_layers, manifest.num_heads, manifest.hidden_size


def _words_of_name(name: str) -> str | None:
    """A document's file name as words; None for the number of a row, and for names without a word."""
    if _NUMBERED.search(name):
        return None
    words = re.sub(r"[-_.]+", " ", PurePath(name).stem)
    return words if _WORD.search(words) else None


def _scores(
    bundles: Sequence[Bundle],
    collection: Collection,
    *,
    trained: int,
    load_one: Callable[[Bundle], Session],
    line: ProgressLine,
) -> Iterator[Score]:
    queries_of_kind = {kind: queries for kind, queries in collection.queries.items() if queries.texts}
    baseline = None
    for number, bundle in enumerate(bundles):
        title = f"Embedding with {bundle.path}"

        def begin(tokens: int, title: str = title, is_first: bool = number == 0) -> None:
            if is_first:  # the others take about as long
                line.begin(title, total=tokens * len(bundles))
            else:
                line.show(title)

        with load_one(bundle) as session:
            computed_in = session.precision
            by_mode = similarities_by_mode(
                session, collection, trained=trained, modes=tuple(LongTextMode), begin=begin, line=line
            )
        scores = {
            (mode, kind): reciprocal_ranks(ranks_of(by_mode[mode][kind], queries.answers))
            for mode in LongTextMode
            for kind, queries in queries_of_kind.items()
        }
        baseline = baseline or {kind: scores[LongTextMode.TRUNCATED, kind] for kind in queries_of_kind}
        for (mode, kind), values in scores.items():
            answers = queries_of_kind[kind].answers
            yield Score(
                bundle=str(bundle.path),
                precision=computed_in,
                mode=mode,
                kind=kind,
                mrr=mean_of(values, answers),
                difference=mean_of(values - baseline[kind], answers),
            )


@dataclass(frozen=True)
class Mean:
    """A mean and its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def ranks_of(similarities: FloatingArray, answers: Sequence[int]) -> FloatingArray:
    """[queries], from 1: the rank of each right document in similarities [queries, documents]; of equal ones it is the
    last, so that ties earn nothing."""
    own = similarities[np.arange(len(answers)), list(answers)]
    return (similarities >= own[:, None]).sum(axis=1).astype(float)


def reciprocal_ranks(ranks: FloatingArray) -> FloatingArray:
    """1 / rank, 0 after the cutoff; their mean is MRR@10."""
    return np.where(ranks <= CUTOFF, 1 / ranks, 0.0)


def mean_of(scores: FloatingArray, answers: Sequence[int]) -> Mean:
    """A mean over scores of queries, [queries], and its interval from drawing documents, because queries of one
    document are alike. Differences of two variants' scores give a paired interval."""
    _, members = np.unique(answers, return_inverse=True)
    sums, counts = np.bincount(members, scores), np.bincount(members)
    random = np.random.default_rng(0)
    means = []
    for _ in range(_RESAMPLES // _RESAMPLES_AT_ONCE):
        drawn = random.integers(0, len(sums), (_RESAMPLES_AT_ONCE, len(sums)))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    mean = float(scores.mean())
    # Documents that score alike have one mean, summed in several orders, so rounding may move a bound past it.
    return Mean(mean, min(float(low), mean), max(float(high), mean))
