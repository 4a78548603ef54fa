"""Where the padding of a batch changes answers, batches are run as given, and texts answer as if they were alone."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime import Encoding, SentenceEncoder, Session
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.manifest import Manifest, PaddingRule
from hdruntime.bundle.reader import open_bundle
from hdruntime.inference.scheduling import PaddingCount
from support.comparators import assert_close, named_case
from support.job_runs import embeddings, random_texts, read, run, write_rows

HIDDEN = "last_hidden_state"
BIGBIRD = PaddingRule(multiple_of=4, free_up_to=8)

Model = Callable[..., np.ndarray]
BundleMaker = Callable[..., Path]


# The limit


def limit_of(bundle: Path, rule: PaddingRule | None) -> Callable[[int], int]:
    return dataclasses.replace(open_bundle(bundle).manifest, padding=rule).padding_limit


def test_a_row_may_be_padded_to_the_end_of_its_last_block_or_of_what_is_dense(bundle_path: Path) -> None:
    assert limit_of(bundle_path, None)(9) == sys.maxsize
    assert [*map(limit_of(bundle_path, BIGBIRD), (1, 8, 9, 12, 13, 4000))] == [8, 8, 12, 12, 16, 4000]
    assert [*map(limit_of(bundle_path, PaddingRule(multiple_of=4)), (1, 4, 5))] == [4, 4, 8]


@pytest.mark.parametrize(("random_blocks", "tokens"), [(0, 1), (0, 20), (0, 21), (1, 29), (1, 32)])
def test_up_to_the_limit_padding_changes_no_answer_of_the_operator_and_beyond_it_does(
    bundle_path: Path, random_blocks: int, tokens: int
) -> None:
    torch = pytest.importorskip(
        "torch", reason="the operator's reference is in PyTorch: pip install 'hdexport[export]'"
    )
    from hdplugins.attention.blocks.reference import block_sparse_attention

    dense_tokens = (5 + 2 * random_blocks) * 4
    rule = PaddingRule(multiple_of=4, free_up_to=dense_tokens)

    def attended(padded: int) -> np.ndarray:
        values = torch.randn(3, 1, tokens, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        query, key, value = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, padded - tokens))
        token_mask = (torch.arange(padded)[None] < tokens).int()
        result = block_sparse_attention(
            query, key, value, token_mask, block_size=4, first_global=1, last_global=1,
            window=1, first_repeats=random_blocks, dense_tokens=dense_tokens, ends_by_row=0, scale=1.0,
        )  # fmt: skip
        return result[0, :tokens].numpy()

    limit = limit_of(bundle_path, rule)(tokens)
    np.testing.assert_allclose(attended(limit), attended(tokens), atol=1e-12)
    # A text of one token has just one thing to see, whatever is behind it.
    if tokens > 1:
        assert np.abs(attended(limit + 1) - attended(tokens)).max() > 1e-3


# Sessions on ONNX Runtime


@pytest.fixture
def session(new_bundle: BundleMaker) -> Iterator[Session]:
    with hdruntime.load(new_bundle(padding=BIGBIRD)) as session:
        yield session


@pytest.fixture
def padding_session(new_bundle: BundleMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session whose backend likes batches of all lengths, as engines do."""
    monkeypatch.setattr(OnnxRuntimeRunner, "max_padding", lambda runner, tokens: sys.maxsize)
    with hdruntime.load(new_bundle(padding=BIGBIRD)) as session:
        yield session


def encodings(lengths: Sequence[int]) -> list[Encoding]:
    ids = [[(5 * row + token * token) % 9 for token in range(length)] for row, length in enumerate(lengths)]
    return [Encoding(row, [0] * len(row), [(0, 0)] * len(row), [0] * len(row)) for row in ids]


def assert_as_alone(given: Sequence[Encoding], results: Sequence[dict[str, np.ndarray]], model: Model) -> None:
    for encoding, result in zip(given, results, strict=True):
        alone = model(np.array([encoding.input_ids]), padding=BIGBIRD)[0]
        np.testing.assert_allclose(result[HIDDEN], alone, atol=1e-5)


@pytest.mark.parametrize("tokens", [8, 9, 13, 16])
def test_a_batch_is_answered_as_it_is_given(session: Session, model: Model, tokens: int) -> None:
    generator = np.random.default_rng(tokens)
    ids = generator.integers(0, 9, (5, tokens))
    right = (np.arange(tokens) < np.array([[tokens], [tokens - 1], [5], [1], [0]])).astype(np.int64)
    holes = generator.integers(0, 2, (5, tokens))
    masks = {"right": right, "left": right[:, ::-1], "holes": holes, "none": np.ones_like(ids), "all": 0 * ids}
    for name, mask in masks.items():
        with named_case(name):
            expected = np.where(mask[..., None] == 1, model(ids, mask, BIGBIRD), 0)
            np.testing.assert_allclose(session(input_ids=ids, attention_mask=mask)[HIDDEN], expected, atol=1e-5)
    real = sum(int(mask.sum()) for mask in masks.values())
    assert session.padding == PaddingCount(tokens=real, padded_tokens=5 * ids.size - real)


def test_where_padding_changes_nothing_it_is_still_cut_off(new_bundle: BundleMaker) -> None:
    with hdruntime.load(new_bundle()) as session:
        session(input_ids=[[4] * 9] * 2, attention_mask=[[1] * 9, [1] * 5 + [0] * 4])
        assert session.padding == PaddingCount(tokens=14, padded_tokens=0)


def test_a_batch_that_is_cut_to_its_rows_would_be_noticed(new_bundle: BundleMaker, model: Model) -> None:
    path = new_bundle(padding=BIGBIRD)
    seal(path, dataclasses.replace(open_bundle(path).manifest, padding=None))
    ids, mask = np.full((2, 13), 4), np.arange(13) < [[13], [9]]
    with hdruntime.load(path) as session:
        wrong = session(input_ids=ids, attention_mask=mask)[HIDDEN]
    expected = np.where(mask[..., None], model(ids, mask, BIGBIRD), 0)
    np.testing.assert_allclose(wrong[0], expected[0], atol=1e-5)
    assert np.abs(wrong[1] - expected[1]).max() > 0.01


def test_texts_answer_as_they_do_alone(padding_session: Session, model: Model) -> None:
    for batch_tokens, seed in itertools.product([1, 40, None], range(3)):
        with named_case(batch_tokens, seed):
            given = encodings(np.random.default_rng(seed).integers(1, 17, 50).tolist())
            assert_as_alone(given, padding_session.infer(given, batch_tokens=batch_tokens), model)


def test_texts_of_one_limit_share_a_batch_and_its_padding_is_counted(padding_session: Session) -> None:
    given = encodings([9, 3, 12, 8, 16, 1, 13])
    batches = [sorted(result.rows) for result in padding_session.run_batches(given)]
    assert batches == [[4, 6], [0, 2], [1, 3, 5]]
    assert padding_session.padding == PaddingCount(tokens=62, padded_tokens=3 + 3 + 5 + 7)


def test_texts_that_share_any_batch_would_be_noticed(
    new_bundle: BundleMaker, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxRuntimeRunner, "max_padding", lambda runner, tokens: sys.maxsize)
    monkeypatch.setattr(Manifest, "padding_limit", lambda manifest, tokens: sys.maxsize)
    given = encodings([16, 9, 12, 5])
    with hdruntime.load(new_bundle(padding=BIGBIRD)) as session, pytest.raises(AssertionError):
        assert_as_alone(given, session.infer(given), model)


def test_vectors_are_those_of_texts_alone_whoever_asks(padding_session: Session, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    texts = random_texts(60)
    alone = embeddings(path, texts)
    assert_close(padding_session.embed(texts), alone, atol=1e-5)
    with SentenceEncoder(path) as encoder:
        assert_close(encoder.encode(texts), alone, atol=1e-5)
    # Sixty rows and ten: what is resumed has other company.
    for count in (60, 10):
        run(path, write_rows(tmp_path / f"{count}.jsonl", list(texts[:count])), tmp_path / f"{count}-out.jsonl")
        rows = read(tmp_path / f"{count}-out.jsonl")
        assert_close(np.array([row["embedding"] for row in rows], np.float32), alone[:count], atol=1e-5)
