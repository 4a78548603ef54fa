"""What longer positions and windows do to a real model that was not trained with them: retrieval of long documents.

Usage: python -m benchmarks.quality.retrieval [--sentences 10] [--window 256] [--output FILE]

The documents are the topics of Python's own help that have more tokens than all-MiniLM-L6-v2 has positions, 512. A
query has one right document, and its rank by cosine counts. There are three kinds:

* name: the topic's name. The document's title often repeats it, within the first 512 tokens.
* first: its first sentence of prose, taken out of the document.
* later: up to ten sentences per document from after its 512th token, taken out of it: what a model that reads 512
  tokens never sees.

Sentences that occur more than once are not queries: some topics contain others.

Each kind is asked among the long topics alone and among all topics, short ones included. MRR looks at the first ten
documents. Differences from truncation at 512 tokens are paired, with bootstrap intervals of 95 % that draw
documents, not queries, since queries of one document are alike: an interval around 0 is noise. Nothing is timed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.record import append, command_line, now
from benchmarks.texts import tokenizer_of
from hdexport.bench.measure.calls import environment

CUTOFF = 10
"""Documents of a ranking that count."""

BASELINE = "truncated"
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.45)

_RESAMPLES = 10_000
_PARAGRAPH = re.compile(r"(?:[^\n]*\S[^\n]*(?:\n|\Z))+")
_SENTENCE = re.compile(r'(?<!\S)["*(]*[A-Z].*?[.:](?=\s|\Z)', re.DOTALL)
"""From a capital to the next full stop or colon."""

_FEWEST_WORDS, _MOST_WORDS = 8, 60
_NOT_PROSE = (">>>", "::=", "===", "***", "---")
_PACKAGES = ("hdexport", "torch", "transformers", "onnxruntime", "numpy", "python")

FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Variant:
    """A bundle and how texts are fed to it.

    Attributes:
        name: in the table.
        positions: scheme, None for the checkpoint's own positions.
        alpha: of hierarchical positions.
        windowed: whether attention is cut to windows.
        overflow: what happens to longer texts.
    """

    name: str
    positions: str | None = None
    alpha: float | None = None
    windowed: bool = False
    overflow: str = "truncate"


@dataclass(frozen=True)
class Queries:
    """Queries of one kind, and the collection that they are asked of.

    Attributes:
        kind: in the table.
        documents: name -> text, the answers taken out.
        texts: the queries.
        answers: of each query, the index of its document.
    """

    kind: str
    documents: dict[str, str]
    texts: list[str]
    answers: list[int]


def main() -> int:
    """Build the variants, embed with each, and report."""
    options = _options()
    from hdexport.checkpoint import default_model, find_checkpoint

    checkpoint = find_checkpoint(options.model or default_model()[0])
    base = checkpoint.base_positions
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"max_len": options.max_len, "window": options.window}
        bundles = {each: bundle_of(each, checkpoint, Path(folder), **sizes) for each in variants(options)}
        tokenizer = tokenizer_of(next(iter(bundles.values())) / "tokenizer.json")
        kinds = queries_of(topics, tokenizer, base=base, sentences=options.sentences)
        similarities = {}
        for variant, bundle in bundles.items():
            print(f"embedding: {variant.name}", file=sys.stderr)
            similarities[variant.name] = _similarities(bundle, variant, kinds)
    lengths = [len(each.ids) for each in tokenizer.encode_batch(list(topics.values()))]
    machine = environment()
    result = {
        "benchmark": "quality",
        "date": now(),
        "command": command_line("benchmarks.quality.retrieval"),
        "commit": machine.get("commit"),
        "versions": {name: machine[name] for name in _PACKAGES},
        "model": checkpoint.name,
        "max_len": options.max_len,
        "collections": {
            "long topics": _about([tokens for tokens in lengths if tokens > base]),
            "all topics": _about(lengths),
        },
        "queries": {kind.kind: len(kind.texts) for kind in kinds},
        "results": results_of(similarities, kinds, is_long=[tokens > base for tokens in lengths]),
    }
    _report(result)
    append(options.output, result)
    return 0


def variants(options: argparse.Namespace) -> list[Variant]:
    """What is compared, the baseline first."""
    hierarchical = [Variant(f"hierarchical {alpha:g}", "hierarchical", alpha) for alpha in ALPHAS]
    window = f"window:{options.window}"
    return [
        Variant(BASELINE),
        Variant("split", overflow="split"),
        *hierarchical,
        Variant("tile", "tile"),
        Variant(f"hierarchical 0.4, {window}", "hierarchical", 0.4, windowed=True),
        Variant(f"tile, {window}", "tile", windowed=True),
    ]


def bundle_of(variant: Variant, checkpoint: Any, folder: Path, *, max_len: int, window: int) -> Path:
    """Build a variant, unless another has built the same; graphs are compared with PyTorch by the tests, not here."""
    from hdexport.attention.kinds import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdexport.model.positions import DEFAULT_ALPHA, Scheme

    path = folder / f"{variant.positions}-{variant.alpha}-{variant.windowed}"
    if not path.exists():
        options = BuildOptions(
            model=checkpoint.path,
            output=path,
            max_len=checkpoint.base_positions if variant.positions is None else max_len,
            scheme=Scheme(variant.positions or "none"),
            alpha=DEFAULT_ALPHA if variant.alpha is None else variant.alpha,
            attention=attention_from_spec(f"window:{window}" if variant.windowed else None),
            verify=None,
        )
        build(options)
    return path


def queries_of(documents: Mapping[str, str], tokenizer: Any, *, base: int, sentences: int) -> list[Queries]:
    """The three kinds; only documents of more than `base` tokens are asked for.

    Args:
        tokenizer: finds the tokens, special ones included.
        base: tokens that the model reads without extension.
        sentences: the most later sentences per document, spread over what follows its first `base` tokens.
    """
    by_name, by_first, by_later = (Queries(kind, dict(documents), [], []) for kind in ("name", "first", "later"))
    flat = {name: " ".join(text.split()) for name, text in documents.items()}
    for index, (name, text) in enumerate(documents.items()):
        encoded = tokenizer.encode(text)
        if len(encoded.ids) <= base:
            continue
        by_name.texts.append(name.replace("-", " "))
        by_name.answers.append(index)
        found = [(start, end) for start, end in prose_sentences(text) if _is_only_here(text[start:end], flat)]
        behind = [span for span in found if span[0] >= encoded.offsets[base - 1][0]]
        spread = np.unique(np.linspace(0, len(behind) - 1, min(sentences, len(behind))).astype(int))
        for queries, spans in ((by_first, found[:1]), (by_later, [behind[place] for place in spread])):
            queries.texts.extend(" ".join(text[start:end].split()) for start, end in spans)
            queries.answers.extend([index] * len(spans))
            queries.documents[name] = without(text, spans)
    return [by_name, by_first, by_later]


def prose_sentences(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each sentence of prose; headings, code and grammars are not prose."""
    for paragraph in _PARAGRAPH.finditer(text):
        if not any(mark in paragraph[0] for mark in _NOT_PROSE):
            for found in _SENTENCE.finditer(paragraph[0]):
                if _FEWEST_WORDS <= len(found[0].split()) <= _MOST_WORDS:
                    yield paragraph.start() + found.start(), paragraph.start() + found.end()


def _is_only_here(sentence: str, flat: Mapping[str, str]) -> bool:
    words = " ".join(sentence.split())
    return sum(text.count(words) for text in flat.values()) == 1


def without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """A text without some of its parts, which are in order and do not overlap."""
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))


def _similarities(bundle: Path, variant: Variant, kinds: Sequence[Queries]) -> dict[str, FloatArray]:
    """Kind -> [queries, documents], cosines."""
    import hdruntime

    # Most documents are the same in several collections.
    places: dict[str, int] = {}
    for kind in kinds:
        for text in (*kind.texts, *kind.documents.values()):
            places.setdefault(text, len(places))
    with hdruntime.load(bundle, backend="onnxruntime") as session:
        vectors = session.embed(list(places), overflow=variant.overflow)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def of(texts: Iterable[str]) -> FloatArray:
        return vectors[[places[text] for text in texts]]

    return {kind.kind: of(kind.texts) @ of(kind.documents.values()).T for kind in kinds}


def results_of(
    similarities: Mapping[str, Mapping[str, FloatArray]], kinds: Sequence[Queries], *, is_long: Sequence[bool]
) -> list[dict[str, Any]]:
    """One entry a collection, kind and variant.

    Args:
        similarities: variant -> kind -> [queries, documents].
        is_long: of each document.
    """
    entries = []
    long = np.flatnonzero(is_long)
    for collection, kept in (("long topics", long), ("all topics", np.arange(len(is_long)))):
        for kind in kinds:
            answers = np.array(kind.answers)
            ranks = {name: ranks_of(of[kind.kind], answers, kept) for name, of in similarities.items()}
            for name in similarities:
                scores, baseline = reciprocal_ranks(ranks[name]), reciprocal_ranks(ranks[BASELINE])
                entry = {"collection": collection, "kind": kind.kind, "variant": name, "mrr": float(scores.mean())}
                entry["mrr_interval"] = interval(scores, answers)
                entry["mrr_difference"] = float((scores - baseline).mean())
                entry["mrr_difference_interval"] = interval(scores - baseline, answers)
                entries.append(entry)
    return entries


def ranks_of(similarities: FloatArray, answers: npt.NDArray[np.int64], kept: npt.NDArray[np.int64]) -> FloatArray:
    """[queries], from 1, the rank of each right document; of equal ones it is the last, so that ties earn nothing.

    Args:
        answers: [queries], the right documents.
        kept: [collection], the documents that are ranked; all right ones are among them.
    """
    own = similarities[np.arange(len(answers)), answers]
    return (similarities[:, kept] >= own[:, None]).sum(axis=1).astype(float)


def reciprocal_ranks(ranks: FloatArray) -> FloatArray:
    """1 / rank, 0 after the cutoff; their mean is MRR@10."""
    return np.where(ranks <= CUTOFF, 1 / ranks, 0.0)


def interval(scores: FloatArray, groups: npt.NDArray[np.int64]) -> tuple[float, float]:
    """The bootstrap interval of 95 % of a mean, whole groups drawn.

    Args:
        scores: [queries].
        groups: [queries], the group of each.
    """
    _, members = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(members, scores), np.bincount(members)
    drawn = np.random.default_rng(0).integers(0, len(sums), (_RESAMPLES, len(sums)))
    low, high = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a sentence-transformers checkpoint (default: the sample model)")
    parser.add_argument("--max-len", type=int, default=4096, help="tokens of the extended models")
    parser.add_argument("--window", type=int, default=256, help="tokens on each side, of the windowed variants")
    parser.add_argument("--sentences", type=int, default=10, help="later sentences per document")
    parser.add_argument("--output", type=Path, help="append the result to this file, as a JSON line")
    return parser.parse_args()


def _about(lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "documents": len(lengths),
        "tokens_median": int(np.median(lengths)),
        "tokens_largest": max(lengths),
        "tokens_all": sum(lengths),
    }


def _report(result: Mapping[str, Any]) -> None:
    print(
        f"{result['command']}: {result['model']}, up to {result['max_len']} tokens, "
        f"Python {result['versions']['python']}"
    )
    for collection, about in result["collections"].items():
        print(
            f"{collection}: {about['documents']} documents, median {about['tokens_median']} tokens, "
            f"largest {about['tokens_largest']}"
        )
    for collection in result["collections"]:
        for kind, number in result["queries"].items():
            print(f"\n{collection}, {kind}: {number} queries")
            print(f"  {'':<30} MRR@10  difference from {BASELINE}")
            for entry in result["results"]:
                if (entry["collection"], entry["kind"]) == (collection, kind):
                    low, high = entry["mrr_difference_interval"]
                    difference = f"{entry['mrr_difference']:+.3f} ({low:+.3f} to {high:+.3f})"
                    print(f"  {entry['variant']:<30} {entry['mrr']:.3f}  {difference}")


if __name__ == "__main__":
    sys.exit(main())
