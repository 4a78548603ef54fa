"""Positions that each text spreads over its own length, against transformers with a table made for that length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hdexport.checkpoint import find_checkpoint
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.surgery import extend_positions
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.manifest import Scheme, Task
from hdruntime.bundle.reader import open_bundle
from support.answers import assert_answers, inputs_of
from support.comparators import assert_close
from support.grids import nightly_unless
from support.hugging_face import AFTER_PADDING_ROW, HuggingFace
from support.padded_batches import cases
from support.tiny_models import BASE, PAD_TOKEN_ID, save_tiny_model

LENGTHS = (1, BASE - 1, BASE, BASE + 1, 2 * BASE, 2 * BASE + 1, 300)
LEARNED = [name for name in SUPPORTED_MODEL_TYPES if family_of(name).learned_positions]
DENSE = [name for name in LEARNED if family_of(name).native_attention is None]


def rows_of_text(rows: np.ndarray, tokens: int, scheme: str) -> np.ndarray:
    """The rows of a text of so many tokens by the definition, [tokens, width], float64, token by token."""
    base = len(rows)
    if tokens <= base:
        return rows[:tokens].astype(np.float64)
    found = []
    for p in range(tokens):
        if scheme == "group":
            found.append(rows[int(np.floor(p / np.ceil(tokens / base)))].astype(np.float64))
            continue
        x = p * base / tokens
        low = min(int(np.floor(x)), base - 1)
        high = min(low + 1, base - 1)
        found.append((1 - (x - low)) * rows[low] + (x - low) * rows[high].astype(np.float64))
    return np.stack(found)


class OneTextAtATime:
    """Transformers' answers to the real tokens of each text alone, with a table that was made for its length."""

    def __init__(self, bundle, scheme: str) -> None:
        self.scheme = scheme
        self.hugging_face = HuggingFace(bundle.checkpoint, bundle.manifest.task, max_len=300)
        first_row = PAD_TOKEN_ID + 1 if bundle.manifest.model_type in AFTER_PADDING_ROW else 0
        self.front, self.rows = np.split(self.hugging_face.checkpoint_rows, [first_row])

    def __call__(self, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs by name, 0 at padding; of texts of real tokens only."""
        table = self.hugging_face.model.base_model.embeddings.position_embeddings
        results: dict[str, np.ndarray] = {}
        for index, mask in enumerate(feeds["attention_mask"]):
            real = mask == 1
            rows = rows_of_text(self.rows, real.sum(), self.scheme)
            with torch.no_grad():
                table.weight[: len(self.front) + len(rows)] = torch.from_numpy(np.concatenate([self.front, rows]))
            answers = self.hugging_face(**{name: values[index : index + 1, real] for name, values in feeds.items()})
            for name, values in answers.items():
                shape = (len(feeds["attention_mask"]), len(mask), *values.shape[2:])
                results.setdefault(name, np.zeros(shape, np.float32))[index, real] = values[0]
        return results


@pytest.mark.parametrize(
    ("model_type", "scheme", "precision"),
    # Without rows in front of the table and with them; a table that is wider than its lookup is in nightly runs.
    [nightly_unless(name == "bert", name, "interpolate", "float32") for name in DENSE]
    + [nightly_unless(False, "roberta", "group", "float16")],
)
def test_each_text_gets_the_answers_of_a_table_for_its_length(
    tiny_bundles, model_type: str, scheme: str, precision: str
) -> None:
    bundle = tiny_bundles(model_type, scheme=scheme, precision=precision)
    positions = bundle.manifest.positions
    assert (positions.form, positions.scheme, positions.rows, positions.base) == ("by_length", scheme, 300, BASE)
    (table,) = (v for v in bundle.graph.graph.initializers.values() if "position_embeddings" in v.name)
    assert table.shape == (
        BASE,
        bundle.manifest.hidden_size if model_type not in ("albert", "electra", "rembert") else 16,
    )
    expected = OneTextAtATime(bundle, scheme)
    tolerance = {} if precision == "float32" else {"cosine": 0.999}
    for tokens, name, *batch in cases(LENGTHS):
        if model_type == "mpnet" and name.startswith("holes"):
            continue  # The distances of its bias count holes.
        feeds = inputs_of(bundle, *batch)
        assert_answers(bundle, feeds, expected(**feeds), case=(f"{tokens} tokens", name), **tolerance)


@pytest.mark.parametrize("scheme", ["interpolate", "group"])
@pytest.mark.parametrize("model_type", ["roberta", "longformer"])
def test_what_is_traced_gives_each_text_the_answers_of_a_table_for_its_length(
    traced_models, model_type: str, scheme: str
) -> None:
    """With rows in front of the table, and where positions are windows' as well."""
    model = traced_models(model_type, scheme=scheme)
    expected = OneTextAtATime(model, scheme)
    for tokens, name, *batch in cases((BASE, BASE + 1, 2 * BASE + 1)):
        if model_type == "longformer" and name.startswith("holes"):
            continue  # Its windows count holes.
        feeds = inputs_of(model, *batch)
        assert_answers(model, feeds, expected(**feeds), case=(f"{tokens} tokens", name))


def test_texts_that_the_checkpoint_has_rows_for_read_them_bit_for_bit(tmp_path) -> None:
    scheme, precision = "interpolate", "float16"
    save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    family = family_of("bert")
    model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION).to(getattr(torch, precision))
    rows = model.embeddings.position_embeddings.weight.detach().clone()
    extend_positions(model.float(), family, max_len=300, scheme=Scheme(scheme), alpha=0.4)
    model.to(getattr(torch, precision))
    seen: list[torch.Tensor] = []
    model.embeddings.position_embeddings.register_forward_hook(lambda module, given, found: seen.append(found))
    mask = torch.zeros(2, 300, dtype=torch.int64)
    mask[0, -BASE:], mask[1, 10:20] = 1, 1
    with torch.inference_mode():
        model(input_ids=torch.full((2, 300), 7), attention_mask=mask)
    assert torch.equal(seen[0][0, -BASE:], rows)
    assert torch.equal(seen[0][1, 10:20], rows[:10])


def test_a_text_far_longer_than_float32_counts_is_placed_exactly(tmp_path) -> None:
    """Products of positions and rows leave float32's integers: 2**24 is passed at 262 145 tokens here."""
    save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    family = family_of("bert")
    model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    rows = model.embeddings.position_embeddings.weight.detach().numpy().copy()
    tokens = 400_003
    extend_positions(model, family, max_len=tokens, scheme=Scheme.GROUP, alpha=0.4)
    lookup = model.embeddings.position_embeddings
    lookup._text.mask = torch.ones(1, tokens, dtype=torch.int64)
    found = lookup(torch.zeros(1, tokens, dtype=torch.int64))[0].detach().numpy()
    place = np.arange(tokens) // -(-tokens // BASE)
    assert np.array_equal(found, rows[place])


@pytest.mark.parametrize(
    ("model_type", "scheme", "attention", "grid"),
    [("bert", "interpolate", None, Grid.QUICK)]
    + [nightly_unless(False, name, "interpolate", None, Grid.FULL) for name in sorted({*LEARNED} - {*DENSE})]
    + [
        nightly_unless(False, "bert", "group", "window:16,global:1", Grid.FULL),
        nightly_unless(False, "roberta", "interpolate", "bigbird:block=16", Grid.FULL),
    ],
)
def test_models_with_windows_and_blocks_are_verified(
    tiny_bundles, model_type: str, scheme: str, attention: str | None, grid: Grid
) -> None:
    bundle = tiny_bundles(model_type, scheme=scheme, attention=attention)
    assert bundle.manifest.positions.form == "by_length"
    found = verify_bundle(
        open_bundle(bundle.path), reference_of(open_bundle(bundle.path), find_checkpoint(bundle.checkpoint)), grid=grid
    )
    assert found.passed, found.failed


def test_a_fixed_stretch_is_one_table(tmp_path) -> None:
    save_tiny_model(tmp_path, "roberta", Task.FEATURE_EXTRACTION)
    model, family = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION), family_of("roberta")
    found = extend_positions(model, family, max_len=300, scheme=Scheme.INTERPOLATE_STATIC, alpha=0.4)
    table = family.embeddings(model).position_embeddings.weight.detach().numpy()
    checkpoint = HuggingFace(tmp_path, "feature-extraction", max_len=300).checkpoint_rows
    assert_close(table[2:], rows_of_text(checkpoint[2:], 300, "interpolate"), atol=1e-6)
    assert table[:2].tobytes() == checkpoint[:2].tobytes()
    assert (found.form, found.alpha) == ("folded", None)
