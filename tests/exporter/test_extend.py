"""An extended checkpoint is one that Hugging Face loads, with every bit but the new rows as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM

from hdexport.checkpoint.trust import Trust
from hdexport.extend import ExtendOptions, extend
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.positions import extend_table
from hdruntime.bundle.manifest import Scheme, Task
from hdruntime.errors import ModelError
from support.grids import EVERY_RUN_TYPES, nightly_unless
from support.hugging_face import AFTER_PADDING_ROW
from support.tiny_models import BASE, save_tiny_model

TABLE = "embeddings.position_embeddings.weight"
WEIGHTS = "model.safetensors"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny BERT's directory."""
    save_tiny_model(tmp_path / "model", "bert", Task.FEATURE_EXTRACTION)
    return tmp_path / "model"


@pytest.fixture
def longer(tmp_path: Path) -> Path:
    """Where the extended checkpoint goes."""
    return tmp_path / "longer"


# Encoders of larger models fill no mask; their extension is in test_longformer.py and test_big_bird.py.
@pytest.mark.parametrize(
    "model_type",
    [
        nightly_unless(name in EVERY_RUN_TYPES, name)
        for name in SUPPORTED_MODEL_TYPES
        if family_of(name).learned_positions and family_of(name).tasks is None
    ],
)
def test_hugging_face_loads_every_family_and_runs_it_at_the_new_length(
    tmp_path: Path, longer: Path, model_type: str
) -> None:
    # The longest that there is, once; dense attention to it takes seconds, and MPNet's gigabytes.
    max_len = BASE * BASE if model_type == "bert" else 200
    save_tiny_model(tmp_path / "model", model_type, Task.FILL_MASK)
    extend(ExtendOptions(model=tmp_path / "model", output=longer, max_len=max_len))
    model, report = AutoModelForMaskedLM.from_pretrained(longer, output_loading_info=True)
    assert not any(report.values()), report
    first_row = 2 if model_type in AFTER_PADDING_ROW else 0
    assert model.config.max_position_embeddings == first_row + max_len
    with torch.inference_mode():
        logits = model(input_ids=torch.full((1, max_len), 7)).logits
    assert logits.shape[1] == max_len
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [(torch.float32, Scheme.TILE), (torch.float16, Scheme.HIERARCHICAL), (torch.bfloat16, Scheme.HIERARCHICAL)],
    ids=str,
)
def test_every_tensor_keeps_its_bits_and_type_and_only_rows_are_added(
    model: Path, longer: Path, dtype: torch.dtype, scheme: Scheme
) -> None:
    before = {name: value.to(dtype) for name, value in load_file(model / WEIGHTS).items()}
    # A head that no class of transformers knows.
    before["my_head.weight"] = torch.arange(6, dtype=torch.int32).view(2, 3)
    save_file(before, model / WEIGHTS, metadata={"format": "pt"})
    extend(ExtendOptions(model=model, output=longer, max_len=300, scheme=scheme))
    after = load_file(longer / WEIGHTS)
    assert set(after) == set(before)
    for name in set(before) - {TABLE}:
        assert same_bits(after[name], before[name]), name
    assert same_bits(after[TABLE][:BASE].contiguous(), before[TABLE])
    exact = torch.from_numpy(extend_table(before[TABLE].double().numpy(), 300, scheme=scheme))
    # Rounded once: within half a step of the type, which is 2**-24 for the smallest numbers of float16.
    torch.testing.assert_close(after[TABLE].double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=2**-25)


def test_buffers_of_positions_in_old_files_grow_too(model: Path, longer: Path) -> None:
    weights = load_file(model / WEIGHTS)
    weights["embeddings.position_ids"] = torch.arange(BASE)[None]
    weights["embeddings.token_type_ids"] = torch.zeros(1, BASE, dtype=torch.int64)
    save_file(weights, model / WEIGHTS, metadata={"format": "pt"})
    extend(ExtendOptions(model=model, output=longer, max_len=200))
    after = load_file(longer / WEIGHTS)
    assert after["embeddings.position_ids"].tolist() == [list(range(200))]
    assert after["embeddings.token_type_ids"].tolist() == [[0] * 200]


def test_a_checkpoint_can_be_cut(model: Path, longer: Path) -> None:
    extend(ExtendOptions(model=model, output=longer, max_len=40))
    before, after = load_file(model / WEIGHTS), load_file(longer / WEIGHTS)
    assert same_bits(after[TABLE], before[TABLE][:40].contiguous())


def test_weights_have_the_permissions_of_the_config(model: Path, longer: Path) -> None:
    extend(ExtendOptions(model=model, output=longer, max_len=100))
    assert (longer / WEIGHTS).stat().st_mode == (model / "config.json").stat().st_mode


def test_a_checkpoint_in_several_files_stays_in_several(model: Path, longer: Path) -> None:
    original = AutoModel.from_pretrained(model)
    shutil.rmtree(model)
    original.save_pretrained(model, max_shard_size="30KB")
    assert len(list(model.glob("model-*.safetensors"))) > 1
    extend(ExtendOptions(model=model, output=longer, max_len=200))
    assert sorted(path.name for path in longer.iterdir()) == sorted(path.name for path in model.iterdir())
    extended, report = AutoModel.from_pretrained(longer, output_loading_info=True)
    assert not any(report.values()), report
    assert extended.embeddings.position_embeddings.weight.shape == (200, 32)


def test_a_pickle_becomes_safetensors_where_it_is_allowed(tmp_path: Path, longer: Path) -> None:
    original = save_tiny_model(tmp_path / "model", "bert", Task.FILL_MASK)
    (tmp_path / "model" / WEIGHTS).unlink()
    # With the decoder tied to the word embeddings: two names, one memory.
    torch.save(original.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"as a pickle \(\.bin\).*\nConvert .* allow_pickle=True"):
        extend(ExtendOptions(model=tmp_path / "model", output=longer, max_len=200))
    assert not longer.exists()
    extend(ExtendOptions(model=tmp_path / "model", output=longer, max_len=200, trust=Trust(allow_pickle=True)))
    assert list(longer.glob("*.bin")) == []
    extended = AutoModelForMaskedLM.from_pretrained(longer).state_dict()
    for name, value in original.state_dict().items():
        if not name.endswith(TABLE):
            assert same_bits(extended[name], value), name


def test_computed_positions_need_no_extension_and_are_not_given_one(tmp_path: Path, longer: Path) -> None:
    save_tiny_model(tmp_path / "model", "modernbert", Task.FEATURE_EXTRACTION)
    message = r"model is a modernbert: its positions are computed, .* no table to extend\.\nBuild it .*--max-len 16384"
    with pytest.raises(ModelError, match=message):
        extend(ExtendOptions(model=tmp_path / "model", output=longer, max_len=200))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
