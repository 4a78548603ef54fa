"""Runs a package as its system would, and compares it with the bundle in hdexport's runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hdexport.package.target import Package, PackageTarget, is_reranker
from hdruntime.errors import VerificationError

if TYPE_CHECKING:
    from hdruntime.arrays import FloatArray
    from hdruntime.session import Session

COSINE = 0.99999
"""The smallest cosine of an output and the bundle's that passes."""

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
        words: of the text.
        cosine: the smallest of the outputs' cosines.
        output: the output that has it.
    """

    words: int
    cosine: float
    output: str


def sample_texts() -> Iterator[tuple[int, str]]:
    """The number of words, and a text of so many."""
    sentence = _SENTENCE.split(" ")
    for words in LENGTHS:
        yield words, " ".join((sentence * (words // len(sentence) + 1))[:words])


def cosine(found: FloatArray, expected: FloatArray) -> float:
    """The cosine of two arrays; 0 where their sizes differ or a number is not finite."""
    if found.size != expected.size:
        return 0.0
    a, b = found.ravel().astype(np.float64), expected.ravel().astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    value = float(a @ b) / norms if norms else float(a.tolist() == b.tolist())
    return value if np.isfinite(value) else 0.0


def compare(target: PackageTarget, package: Package) -> list[Compared]:
    """Compare every sample text.

    Raises:
        VerificationError: an output differs; the message has each text's cosine.
        MissingDependencyError: the system's library is not installed.
    """
    import hdruntime

    assert target.run is not None
    with hdruntime.load(package.bundle, "onnxruntime", max_seq_length=package.max_seq_length) as session:
        query = (_QUERY,) if is_reranker(package.bundle.manifest) else ()
        inputs = [(words, (*query, text)) for words, text in sample_texts()]
        found = [_compared(words, target.run(package, *texts), _expected(session, texts)) for words, texts in inputs]
    failed = [each for each in found if each.cosine < COSINE]
    if failed:
        lines = "; ".join(f"{each.words} words: cosine {each.cosine:.6f} ({each.output})" for each in found)
        raise VerificationError(
            f"{target.system} would compute other outputs of the package than the bundle: {lines}. At least {COSINE} "
            "is accepted.",
            hint="Package for another target, or serve the bundle: hdexport serve",
        )
    return found


def _expected(session: Session, texts: tuple[str, ...]) -> Mapping[str, FloatArray]:
    first, *second = ([text] for text in texts)
    encodings = session.tokenize(first, *second, overflow="truncate")
    outputs: Mapping[str, FloatArray] = session.infer(encodings)[0]
    return outputs


def _compared(words: int, found: Mapping[str, FloatArray], expected: Mapping[str, FloatArray]) -> Compared:
    """Of the outputs that both have, the one with the smallest cosine."""
    shared = [name for name in found if name in expected]
    assert shared, f"{sorted(found)} and {sorted(expected)} have no output in common"
    worst = min(shared, key=lambda name: cosine(found[name], expected[name]))
    return Compared(words=words, cosine=cosine(found[worst], expected[worst]), output=worst)
