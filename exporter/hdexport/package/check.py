"""Runs a package as its system would, and compares it with the bundle in hdexport's runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

import hdruntime
from hdexport.package.graph import Dtype
from hdexport.package.target import Package, PackageTarget, is_reranker
from hdruntime.arrays import FloatArray
from hdruntime.errors import Setting, VerificationError
from hdruntime.session import Session

COSINES: Mapping[Dtype, float] = {"float32": 0.99999, "float16": 0.99999, "int8": 0.97}
"""The smallest cosine of an output and the bundle's that passes, by the dtype of the graph.

int8: 270 texts of up to 59 words have at least 0.972 (a text of one word), those of 8 tokens or more 0.976, and the
median is 0.993 (all-MiniLM-L6-v2, onnxruntime 1.31.1 on an AMD EPYC with VNNI, 2026-11-29). With one scale for each
weight, onnxruntime's default, the texts of the check have 0.90 to 0.95.
"""

LENGTHS = (1, 20, 600, 3000)
"""Words of the texts that are compared; with special tokens, texts are a little longer."""

_SENTENCE = (
    "the river flows past an old mill where people grind wheat and rye every autumn before snow falls over hills and "
    "a small town sleeps behind its walls"
)


_QUERY = "who grinds wheat"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One text, by the system's rules and by the bundle.

    Attributes:
        dtype: data type of the package's graph.
        words: number of words of the text.
        cosine: the smallest of the outputs' cosines.
        output: the output that has it.
    """

    dtype: Dtype
    words: int
    cosine: float
    output: str


def sample_texts() -> Iterator[tuple[int, str]]:
    """Texts of several lengths, each with its number of words."""
    sentence = _SENTENCE.split(" ")
    for words in LENGTHS:
        yield words, " ".join((sentence * (words // len(sentence) + 1))[:words])


def cosine(found: FloatArray, expected: FloatArray) -> float:
    """The cosine of two arrays; 0 where their sizes differ or a number is not finite.

    A number alone, whose cosine is its sign, is compared with a 1 beside it.
    """
    if found.size != expected.size:
        return 0.0
    a, b = found.ravel().astype(np.float64), expected.ravel().astype(np.float64)
    if a.size == 1:
        a, b = np.append(a, 1), np.append(b, 1)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    value = float(a @ b) / norms if norms else float(a.tolist() == b.tolist())
    return value if np.isfinite(value) else 0.0


def compare(target: PackageTarget, package: Package) -> list[Compared]:
    """Compare every sample text, with each of the package's graphs.

    Raises:
        VerificationError: an output differs; the message has each text's cosine.
        MissingDependencyError: the system's library is not installed.
    """
    assert target.run is not None
    with hdruntime.load(package.bundle, "onnxruntime", max_seq_length=package.max_seq_length) as session:
        query = (_QUERY,) if is_reranker(package.bundle.manifest) else ()
        inputs = [(words, (*query, text)) for words, text in sample_texts()]
        expected = [_expected(session, package, texts) for _, texts in inputs]
        comparisons = [
            _compared(dtype, words, target.run(package.of(dtype), *texts), wanted)
            for dtype in package.dtypes
            for (words, texts), wanted in zip(inputs, expected, strict=True)
        ]
    for dtype in package.dtypes:
        _check(target, dtype, [each for each in comparisons if each.dtype == dtype])
    return comparisons


def _check(target: PackageTarget, dtype: Dtype, found: list[Compared]) -> None:
    if min(each.cosine for each in found) >= COSINES[dtype]:
        return
    lines = "; ".join(f"{each.words} words: cosine {each.cosine:.6f} ({each.output})" for each in found)
    raise VerificationError(
        f"{target.system} would compute other outputs of the package's {dtype} graph than the bundle: {lines}. At "
        f"least {COSINES[dtype]} is accepted for {dtype}.",
        hint=("Leave the 8-bit weights out: ", Setting("dtype", "float32"))
        if dtype == "int8"
        else "Package for another target, or serve the bundle: hdexport serve",
    )


def _expected(session: Session, package: Package, texts: tuple[str, ...]) -> Mapping[str, FloatArray]:
    first, *second = ([text] for text in (package.prompt + texts[0], *texts[1:]))
    encodings = session.tokenize(first, *second, overflow="truncate")
    return session.infer(encodings)[0]


def _compared(
    dtype: Dtype, words: int, found: Mapping[str, FloatArray], expected: Mapping[str, FloatArray]
) -> Compared:
    """The comparison of the output with the smallest cosine, among the outputs of both."""
    shared = [name for name in found if name in expected]
    assert shared, f"{sorted(found)} and {sorted(expected)} have no output in common"
    worst = min(shared, key=lambda name: cosine(found[name], expected[name]))
    return Compared(dtype=dtype, words=words, cosine=cosine(found[worst], expected[worst]), output=worst)
