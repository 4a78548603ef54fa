"""LongT5's encoders around every boundary of their windows and sides, in half precision, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from transformers.models.longt5 import modeling_longt5

from hdexport.attention.local_global.kind import LocalGlobalKind
from hdexport.attention.local_global.node import LocalTokens
from hdexport.attention.local_global.record import LocalGlobalAttention
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.families import family_of
from hdexport.model.tasks import Task
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError, ModelError
from support.answers import ATOL, assert_as_hugging_face, inputs_of
from support.attention_records import recorded
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.padded_batches import batches
from support.sparse_operators import PADDINGS, token_kinds
from support.tampered_bundles import tampered
from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, change_json, save_tiny_model

RADIUS, SIDE = 7, 16
BLOCK = RADIUS + 1
LENGTHS = sorted(
    {edge + step for edge in (BLOCK, 2 * BLOCK, 3 * BLOCK, SIDE, 2 * SIDE, 5 * SIDE) for step in (-1, 0, 1)}
)
LOCAL = {"encoder_attention_type": "local"}

each_variant = pytest.mark.parametrize("changes", [{}, LOCAL], ids=["transient-global", "local"])


@each_variant
def test_every_boundary_of_windows_and_sides_answers_as_hugging_face(tiny_bundles, changes: dict[str, Any]) -> None:
    """With padding on the left and holes as well, where sides are by the place in the row."""
    assert_as_hugging_face(tiny_bundles("longt5", **changes), LENGTHS)


@each_variant
def test_padding_on_the_left_moves_sides_as_in_hugging_face(tiny_bundles, changes: dict[str, Any]) -> None:
    """A local model's text is answered as it is alone. With sides it is not, in Hugging Face nor here."""
    bundle = tiny_bundles("longt5", **changes)
    ids = np.random.default_rng(4).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, 50))
    alone = bundle.session(input_ids=ids)["last_hidden_state"]
    padded = np.pad(ids, ((0, 0), (5, 0)), constant_values=PAD_TOKEN_ID)
    mask = (np.arange(55) >= 5).astype(np.int64)[None]
    moved = bundle.session(input_ids=padded, attention_mask=mask)["last_hidden_state"][:, 5:]
    if changes:
        assert_close(moved, alone, atol=ATOL)
    else:
        assert np.abs(moved - alone).max() > 1000 * ATOL
    assert_close(moved, bundle.hugging_face(padded, mask)["last_hidden_state"][:, 5:], atol=ATOL)


@pytest.mark.parametrize("changes", [{}, pytest.param(LOCAL, marks=pytest.mark.nightly)], ids=["sides", "local"])
def test_half_precision_is_finite_beside_padding(tiny_bundles, changes: dict[str, Any]) -> None:
    """Where Hugging Face's masked scores are infinite in float16, rows of padding NaN, and then their neighbours."""
    bundle = tiny_bundles("longt5", precision="float16", **changes)
    _, ids, mask = next(batch for batch in batches(129) if batch[0] == "padding on the right, batch 3")
    mask[1] = 0
    feeds = inputs_of(bundle, ids, mask)
    model = transformers.LongT5EncoderModel.from_pretrained(bundle.checkpoint, dtype=torch.float16)
    with torch.inference_mode():
        theirs = model(**{name: torch.from_numpy(values) for name, values in feeds.items()}).last_hidden_state
    assert bool(theirs[0, mask[0] == 1].isnan().any()) is bool(changes)
    for run in (bundle.portable, bundle.session):
        assert np.isfinite(run(**feeds)["last_hidden_state"]).all()


def test_sums_of_sides_are_exact_at_every_length() -> None:
    """Against the library's product with a matrix of ones and zeros, in float64. Measured 5.6e-6, of a sum of 57."""
    states = torch.randn(3, 1031, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for padding, tokens in itertools.product(PADDINGS, (1, 15, 16, 17, 31, 32, 33, 48, 255, 1024, 1031)):
        mask = torch.from_numpy(token_kinds(padding, tokens))
        block_ids, seen = modeling_longt5._make_global_fixed_block_ids(mask.float(), SIDE)
        exact = modeling_longt5._create_global_aggregates(states[:, :tokens], block_ids, seen.shape[1])
        got = LocalTokens(mask, SIDE).side_sums(states[:, :tokens])
        assert got.dtype == torch.float32
        assert got.shape[1] == -(-tokens // SIDE)
        with named_case(padding, tokens):
            for row, whole in enumerate(seen.sum(1).tolist()):
                if whole:
                    assert_close(got[row, :whole].double().numpy(), exact[row, :whole].numpy(), atol=1e-5)


@pytest.mark.parametrize("model_class", ["LongT5EncoderModel", "LongT5ForConditionalGeneration"])
def test_an_encoder_is_loaded_with_or_without_its_decoder(tmp_path: Path, model_class: str) -> None:
    save_tiny_model(tmp_path, "longt5", Task.FEATURE_EXTRACTION)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = getattr(transformers, model_class)(config).eval()
    model.save_pretrained(tmp_path)
    loaded = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    assert type(loaded) is transformers.LongT5EncoderModel
    assert torch.equal(loaded.encoder.embed_tokens.weight, model.shared.weight)
    assert all(
        torch.equal(weight, loaded.encoder.state_dict()[name]) for name, weight in model.encoder.state_dict().items()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_radius": -1}, r"local_radius -1, which must be 0 or more.\nSet it to the model's, e.g. 127"),
        ({"global_block_size": 10}, r"global_block_size 10; a power of two can be built.*\n.*e.g. 16"),
        ({"global_block_size": 0}, "global_block_size 0; a power of two"),
        ({"encoder_attention_type": "dense"}, "`local` or `transient-global` attention type is expected"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets 2 and .*e.g. 32 and 128"),
        ({"relative_attention_max_distance": 1}, "relative_attention_max_distance 1; 4 buckets or more"),
    ],
    ids=str,
)
def test_a_configuration_of_nonsense_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fits_weights = {name: value for name, value in changes.items() if name.startswith("relative")}
    save_tiny_model(tmp_path / "model", "longt5", Task.FEATURE_EXTRACTION, **fits_weights)
    change_json(tmp_path / "model" / "config.json", **changes)
    options = BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", max_len=64)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        build(options)
    assert not options.output.exists()


def test_queries_are_not_scaled(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "longt5", Task.FEATURE_EXTRACTION)
    options = BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", max_len=64, attention_scale="logn")
    with pytest.raises(InputError, match=r"this longt5: its scores are of distances.*\n.*--attention-scale none"):
        build(options)


def test_a_manifest_says_what_tokens_see(tiny_bundles) -> None:
    with_sides, local = tiny_bundles("longt5"), tiny_bundles("longt5", **LOCAL)
    assert recorded(with_sides.manifest, "local_global") == LocalGlobalAttention(
        layers=2, radius=RADIUS, side_tokens=SIDE
    )
    assert recorded(local.manifest, "local_global") == LocalGlobalAttention(layers=2, radius=RADIUS)
    kind = LocalGlobalKind()
    lines = list(kind.describe(recorded(with_sides.manifest, "local_global")))
    assert lines == [
        ("local attention", "2 layers; a token sees 7 tokens on each side"),
        ("", "and the sum of each 16 tokens of the text"),
    ]
    boundaries = kind.boundaries(recorded(with_sides.manifest, "local_global"))
    assert boundaries is not None
    assert boundaries.lengths == set(LENGTHS)
    assert kind.reference_copies(recorded(with_sides.manifest, "local_global"), family_of("longt5"), 12) == 8
    assert kind.reference_copies(recorded(local.manifest, "local_global"), family_of("longt5"), 12) == 0
    keys = [
        kind.keys_of_layers(recorded(bundle.manifest, "local_global"), bundle.manifest, 100)
        for bundle in (with_sides, local)
    ]
    assert keys == [[15 + 6] * 2, [15] * 2]


def test_all_layers_share_one_table_of_each_kind(tiny_bundles) -> None:
    graph = tiny_bundles("longt5").graph.graph
    nodes = [node for node in graph if node.op_type.startswith("LocalGlobalAttention")]
    assert len(nodes) == 2
    for table in (4, 7):
        assert nodes[0].inputs[table] is nodes[1].inputs[table]
        assert nodes[0].inputs[table].is_initializer()
    assert json.loads((tiny_bundles("longt5").checkpoint / "config.json").read_text())["num_layers"] == 2


WRONG = {
    "values of sides are their keys": lambda node: node.replace_input_with(6, node.inputs[5]),
    "numbers of another distance": lambda node: _roll(node.inputs[4]),
    "numbers of another side": lambda node: _roll(node.inputs[7]),
    "tokens left over are in no side": lambda node: _leave_out(node.graph),
}


EVERY_RUN = ("numbers of another distance", "tokens left over are in no side")


def _roll(value: ir.Value) -> None:
    value.const_value = ir.tensor(np.roll(value.const_value.numpy(), 1, axis=1), name=value.name)


def _leave_out(graph: ir.Graph) -> None:
    """Of the sum for the last side, that of its own block is left."""
    choices = [node for node in graph if node.op_type == "Where" and node.inputs[0].producer().op_type == "Equal"]
    assert len(choices) == 2
    for choice in choices:
        choice.replace_input_with(1, choice.inputs[2])


@pytest.mark.parametrize("wrong", [None, *(nightly_unless(name in EVERY_RUN, name) for name in WRONG)])
def test_a_verification_finds_a_wrong_graph(tiny_bundles, tmp_path: Path, wrong: str | None) -> None:
    def change(model: ir.Model) -> None:
        (*_, last) = [node for node in model.graph if node.op_type.startswith("LocalGlobalAttention")]
        if wrong:
            WRONG[wrong](last)

    bundle = tiny_bundles("longt5")
    path = tampered(bundle, tmp_path / "copy", change, "model.onnx")
    reference = reference_of(open_bundle(bundle.path), find_checkpoint(bundle.checkpoint))
    found = verify_bundle(open_bundle(path), reference, grid=Grid.QUICK)
    assert found.passed is (wrong is None), found.summary()
    assert {check.case.padding for check in found.checks} == {"none", "right", "left"}
