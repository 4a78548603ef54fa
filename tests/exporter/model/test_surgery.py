"""Positions and token types in a model and in its graph: the table's rows, and no arithmetic that was not needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.numpy import load_file
from transformers.activations import ACT2FN

import hdexport.model.positions
import hdruntime
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.surgery import extend_positions, fuse_gelu
from hdruntime.bundle.manifest import Scheme, Task
from hdruntime.errors import InputError
from support.answers import assert_as_hugging_face
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.hugging_face import AFTER_PADDING_ROW, ALPHA, extended_rows
from support.tiny_models import BASE, PAD_TOKEN_ID, VOCAB_SIZE, save_tiny_model

LEARNED_POSITIONS = [name for name in SUPPORTED_MODEL_TYPES if family_of(name).learned_positions]


def checkpoint_table(checkpoint: Path) -> np.ndarray:
    weights = load_file(checkpoint / "model.safetensors")
    axial = [value for name, value in sorted(weights.items()) if "position_embeddings.weights." in name]
    if axial:  # Reformer's: [rows, 1, width] and [1, columns, width]
        rows, columns = len(axial[0]), axial[1].shape[1]
        parts = [np.broadcast_to(part, (rows, columns, part.shape[2])) for part in axial]
        return np.concatenate(parts, axis=2).reshape(rows * columns, -1)
    endings = ("embeddings.position_embeddings.weight", "encoder.embed_positions.weight", "pos_emb.emb.weight")
    (table,) = (value for name, value in weights.items() if name.endswith(endings) and "entity" not in name)
    return table


def table_name(model_type: str) -> str:
    """What the table's name in a graph holds."""
    return "pos_emb" if model_type == "performer" else "position_embeddings"


def initializers(model: ir.Model, part: str) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items() if part in name}


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


def gathers_from(model: ir.Model, part: str) -> int:
    return sum(node.op_type == "Gather" and part in str(node.inputs[0].name) for node in model.graph.all_nodes())


@pytest.mark.parametrize(
    ("model_type", "precision"),
    # Rows in front of the table, or none; names of its own; parts by axes.
    [
        nightly_unless(name in ("bert", "roberta", "performer", "reformer"), name, "float32")
        for name in LEARNED_POSITIONS
    ]
    + [("bert", "float16")],
)
def test_the_graphs_table_has_a_row_per_position_and_keeps_the_checkpoints(
    tiny_bundles, model_type: str, precision: str
) -> None:
    bundle = tiny_bundles(model_type, precision=precision)
    checkpoint = checkpoint_table(bundle.checkpoint)
    first_row = PAD_TOKEN_ID + 1 if model_type in AFTER_PADDING_ROW else 0
    (table,) = initializers(bundle.graph, table_name(model_type)).values()
    assert table.dtype == precision
    assert table.shape == (first_row + 300, checkpoint.shape[1])
    assert table[: first_row + BASE].tobytes() == checkpoint.astype(precision).tobytes()
    by_definition = extended_rows(checkpoint[first_row:], 300)
    assert_close(table[first_row:], by_definition, atol=1e-6 if precision == "float32" else 2e-3)
    assert (bundle.manifest.positions.first_row, bundle.manifest.positions.form) == (first_row, "folded")


# LED's graph holds lookups for its global tokens: see test_longformer.py.
@pytest.mark.parametrize(
    "model_type",
    [
        nightly_unless(name in ("bert", "distilbert"), name)
        for name in sorted({*LEARNED_POSITIONS} - {*AFTER_PADDING_ROW, "led"})
    ],
)
def test_positions_that_count_from_0_are_a_slice_of_the_table(tiny_bundles, model_type: str) -> None:
    """In both graphs."""
    bundle = tiny_bundles(model_type)
    for model in (bundle.graph, bundle.cpu_graph):
        assert gathers_from(model, table_name(model_type)) == 0
        assert not operators(model).keys() & {"CumSum", "Range", "Mod", "Div", "GatherElements"}
        slices = [node for node in model.graph.all_nodes() if node.op_type == "Slice"]
        (read,) = [str(node.inputs[0].name) for node in slices]
        assert table_name(model_type) in read


@pytest.mark.parametrize("model_type", [nightly_unless(name == "roberta", name) for name in AFTER_PADDING_ROW])
def test_positions_by_the_padding_rule_are_one_lookup(tiny_bundles, model_type: str) -> None:
    model = tiny_bundles(model_type).graph
    assert gathers_from(model, "position_embeddings") == 1
    assert operators(model)["CumSum"] == 1
    assert "Mod" not in operators(model)


@pytest.mark.parametrize(
    ("model_type", "task", "changes"),
    [
        ("bert", "sentence-similarity", {}),
        ("roberta", "feature-extraction", {}),
        nightly_unless(
            False, "bert", "feature-extraction", {"num_attention_heads": 1, "type_vocab_size": 1, "hidden_act": "relu"}
        ),
    ],
)
def test_a_single_token_type_is_a_constant_row(tiny_bundles, model_type: str, task: str, changes) -> None:
    bundle = tiny_bundles(model_type, task, **changes)
    assert [spec.name for spec in bundle.manifest.inputs] == ["input_ids", "attention_mask"]
    assert gathers_from(bundle.graph, "token_type") == 0
    (row,) = initializers(bundle.graph, "token_type").values()
    weights = load_file(bundle.checkpoint / "model.safetensors")
    (table,) = (value for name, value in weights.items() if name.endswith("token_type_embeddings.weight"))
    np.testing.assert_array_equal(row, table[0])


def built(directory: Path, model_type: str, **options) -> tuple[Path, object]:
    save_tiny_model(directory / "model", model_type, Task.FEATURE_EXTRACTION)
    output = directory / "bundle"
    as_fixtures = {"alpha": ALPHA, "attention_scale": "none", "verify": None}
    return output, build(BuildOptions(model=directory / "model", output=output, **as_fixtures, **options))


# With rows in front of the tables, and without.
@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_the_factored_form_answers_as_hugging_face(
    traced_models, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdexport.model.positions, "FOLDED_LIMIT_BYTES", 0)
    assert_as_hugging_face(traced_models(model_type), (1, 63, 64, 65, 128, 129, 300))


def test_all_n_times_n_positions_take_two_small_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdexport.model.positions, "FOLDED_LIMIT_BYTES", 64 * 1024)
    path, manifest = built(tmp_path, "bert", max_len=BASE * BASE)
    assert (manifest.positions.form, manifest.positions.rows) == ("factored", BASE * BASE)
    size_bytes = sum(path.joinpath(name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    checkpoint_bytes = (tmp_path / "model" / "model.safetensors").stat().st_size
    # 4096 rows of 32 would take 524 288 bytes.
    assert size_bytes < checkpoint_bytes + 100_000
    session = hdruntime.load(path, backend="onnxruntime", threads=1)
    ids = np.random.default_rng(0).integers(2, VOCAB_SIZE, (1, BASE * BASE))
    assert session(input_ids=ids)["last_hidden_state"].shape == (1, BASE * BASE, 32)


@pytest.mark.parametrize("model_type", ["bert", "led", "roberta"])
def test_the_scheme_decides_the_rows(tmp_path: Path, model_type: str) -> None:
    """Of a model that was extended; they are its graph's as the tests above show."""
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    checkpoint, family = checkpoint_table(tmp_path), family_of(model_type)
    for scheme, alpha, max_len in (
        ("tile", None, BASE // 2),
        ("tile", None, 150),
        ("none", None, 40),
        ("hierarchical", 0.25, 150),
        ("hierarchical", ALPHA, BASE // 2),
        ("hierarchical", ALPHA, 5 * BASE),
    ):
        model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
        given = ALPHA if alpha is None else alpha
        found = extend_positions(model, family, max_len=max_len, scheme=Scheme(scheme), alpha=given)
        with named_case(scheme, alpha, max_len):
            assert (found.scheme, found.alpha, found.base, found.rows) == (scheme, alpha, BASE, max_len)
            assert getattr(model.config, family.positions_key) == found.first_row + max_len
            table = family.embeddings(model).position_embeddings.weight.detach().numpy()
            front, rows = np.split(checkpoint, [found.first_row])
            kept = found.first_row + min(BASE, max_len)
            assert table[:kept].tobytes() == checkpoint[:kept].tobytes()
            if alpha is None:
                assert table.tobytes() == np.concatenate([front, rows[np.arange(max_len) % BASE]]).tobytes()
                continue
            new = table[found.first_row :]
            assert_close(new, extended_rows(rows, max_len, alpha=alpha), atol=1e-6)
            other = np.abs(new - extended_rows(rows, max_len, alpha=0.3)).max()
            assert (other > 0.01) == (max_len > BASE)


def test_a_length_that_does_not_fit_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    before = model.embeddings.position_embeddings
    with pytest.raises(InputError, match="max_len"):
        extend_positions(model, family_of("bert"), max_len=BASE * BASE + 1, scheme=Scheme.HIERARCHICAL, alpha=ALPHA)
    assert model.embeddings.position_embeddings is before
    assert model.config.max_position_embeddings == BASE


VALUES = torch.linspace(-8, 8, 4001)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
def test_the_gelu_of_a_tanh_is_one_operator_that_computes_the_same(name: str) -> None:
    model = torch.nn.ModuleDict({"inner": torch.nn.Sequential(ACT2FN[name])})
    expected = model["inner"](VALUES)
    fuse_gelu(model)
    assert type(model["inner"][0]) is torch.nn.GELU
    assert_close(model["inner"](VALUES).numpy(), expected.numpy(), atol=1e-6)
    # GELU by the normal distribution is another function.
    assert (torch.nn.functional.gelu(VALUES) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["gelu", "quick_gelu"])
def test_other_activations_stay_what_they_are(name: str) -> None:
    model = torch.nn.Sequential(ACT2FN[name])
    before = model[0]
    fuse_gelu(model)
    assert model[0] is before
