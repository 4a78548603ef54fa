"""A tiny bundle's graphs give the right answers at every real token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from support.comparators import assert_close, assert_same_directions, named_case
from support.hugging_face import first_real_tokens
from support.padded_batches import cases

ATOL = 2e-5
"""Five times the largest error measured, 4e-6, and a fifth of the promised error."""

GRAPHS = ("portable", "session")


def inputs_of(bundle: Any, input_ids: np.ndarray, attention_mask: np.ndarray, *, types: int = 2) -> dict[str, Any]:
    """All inputs of a bundle, int64 [batch, tokens]: mixed token types, and the first real token of a row marked."""
    values = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "token_type_ids": input_ids % types,
        "global_attention_mask": first_real_tokens(attention_mask),
    }
    return {spec.name: values[spec.name] for spec in bundle.manifest.inputs}


def assert_answers(
    bundle: Any,
    feeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    *,
    atol: float = ATOL,
    cosine: float | None = None,
    graphs: Iterable[str] | None = None,
    case: tuple[object, ...] = (),
) -> None:
    """Both graphs give all expected outputs, in float32: values at real tokens, or one per row.

    Args:
        bundle: a `TinyBundle`, or a `TracedModel`.
        feeds: its inputs; the attention mask says which tokens are real.
        expected: name of each output -> values of all tokens; values at padding are not looked at.
        atol: largest error of a value.
        cosine: compare directions instead, by this smallest cosine.
        graphs: ``portable``, ``session`` or both; of a `TracedModel`, PyTorch's results.
        case: names the case in a failure.
    """
    if bundle.manifest.dtype == "bfloat16":
        # ONNX Runtime has no bfloat16 on a CPU; the lowered graph computes in float32 from bfloat16 weights.
        graphs = ["session"]
    for graph in graphs or (["traced"] if hasattr(bundle, "traced") else GRAPHS):
        got = getattr(bundle, graph)(**feeds)
        with named_case(graph, *case):
            assert set(got) == set(expected)
            for spec in bundle.manifest.outputs:
                real = feeds["attention_mask"] == 1 if "tokens" in spec.shape else ...
                pair = got[spec.name][real], expected[spec.name][real]
                assert pair[0].dtype == np.float32
                if cosine is None:
                    assert_close(*pair, atol=atol)
                else:
                    assert_same_directions(*pair, cosine=cosine)


def assert_as_hugging_face(
    bundle: Any, lengths: Iterable[int], *, sizes: Collection[int] = (3,), types: int = 2, **options: Any
) -> None:
    """Every batch at every length gets Hugging Face's answers; `options` are `assert_answers`'."""
    for tokens, name, input_ids, attention_mask in cases(lengths, sizes=sizes):
        feeds = inputs_of(bundle, input_ids, attention_mask, types=types)
        assert_answers(bundle, feeds, bundle.hugging_face(**feeds), case=(f"{tokens} tokens", name), **options)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays of one shape."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max())
