"""What becomes of a request for LSH attention, and of what a Reformer's config.json leaves open."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import AxialPositionEmbeddings, LSHSelfAttention

from hdexport.attention.attention_type import ConversionContext
from hdexport.attention.lsh import Chunks, Hashes, LshAttention
from hdexport.attention.lsh.attention_type import LshConversion, buckets_for
from hdexport.attention.lsh.discrete_outputs import LshDiscreteOutputs
from hdexport.attention.lsh.model import recall, use_hashes
from hdexport.attention.registry import attention_from_spec, attention_type_named
from hdexport.checkpoint import find_checkpoint
from hdexport.extend import ExtendOptions, extend
from hdexport.families import convertible_model_types, family_of
from hdexport.model.surgery import extend_positions
from hdplugins.attention.lsh.reference import draw_rotations
from hdruntime.bundle.manifest import PaddingRule, Scheme, Task
from hdruntime.errors import InputError, ModelError
from support.comparators import named_case
from support.tiny_models import BASE, save_tiny_model

MAX_LEN = 300
OWN = LshAttention(
    layers=("local", "lsh", "local", "lsh"),
    hashes=Hashes(buckets=(8,), rounds=2, seed=5),
    hashed=Chunks(tokens=16, before=1, after=0),
    local=Chunks(tokens=8, before=1, after=0),
    multiple=16,
)
OPEN = {"num_buckets": None, "hash_seed": None}


@pytest.fixture
def conversion_of(tmp_path: Path):
    """The conversion of a tiny model with `MAX_LEN` positions, and the model."""

    def make(model_type: str, spec: str | None, **changes: object) -> tuple[LshConversion, torch.nn.Module]:
        model = save_tiny_model(tmp_path / "model", model_type, Task.FEATURE_EXTRACTION, **changes)
        family = family_of(model_type)
        extend_positions(model, family, max_len=MAX_LEN, scheme=Scheme.TILE, alpha=0.4)
        context = ConversionContext(
            model=model,
            family=family,
            task=Task.FEATURE_EXTRACTION,
            max_len=MAX_LEN,
            convertible=convertible_model_types,
        )
        return attention_type_named("lsh").conversion(attention_from_spec(spec).get("lsh"), context), model

    return make


def test_a_reformer_has_its_own_attention_and_only_its_hashes_may_change(conversion_of) -> None:
    conversion, _ = conversion_of("reformer", None)
    assert conversion == LshConversion(is_native=True, record=OWN, padding=PaddingRule(multiple_of=16))
    conversion, _ = conversion_of("reformer", "lsh:rounds=3,seed=0,buckets=2/4")
    assert conversion.record == dataclasses.replace(OWN, hashes=Hashes(buckets=(2, 4), rounds=3, seed=0))
    with pytest.raises(InputError, match=r"config\.json of a reformer sets its chunks(.|\n)*lsh:rounds=8,seed=0"):
        conversion_of("reformer", "lsh:chunk=16")
    with pytest.raises(InputError, match="has local layers only, and hashes nothing"):
        conversion_of("reformer", "lsh:seed=1", attn_layers=["local"])


def test_what_a_reformer_leaves_open_is_frozen_and_said(conversion_of) -> None:
    conversion, _ = conversion_of("reformer", None, **OPEN)
    assert conversion.record.hashes == Hashes(buckets=(32,), rounds=2, seed=0)
    assert conversion.note == (
        "The config.json leaves values open, which the bundle fixes: num_buckets 32, as transformers takes for a first "
        "text of 300 tokens; hash_seed 0 (lsh:seed=S chooses another)."
    )
    assert conversion_of("reformer", "lsh:seed=3,buckets=4", **OPEN)[0].note is None


def test_buckets_are_those_that_the_library_takes() -> None:
    for chunk, positions, count in itertools.product((4, 50, 64), (512, 4096, 65536), (2, 3, 7, 8, 100, 255, 1000)):
        if chunk * count > positions:
            continue
        attention = LSHSelfAttention(ReformerConfig(lsh_attn_chunk_length=chunk, max_position_embeddings=positions))
        attention._set_num_buckets(chunk * count)
        found = attention.num_buckets
        expected = (found,) if isinstance(found, int) else tuple(found)
        assert buckets_for(chunk * count, chunk=chunk, positions=positions) == expected, (chunk, positions, count)


def test_a_bert_is_given_hashes_and_told_that_it_was_not_trained_with_them(conversion_of, caplog) -> None:
    conversion, _ = conversion_of("bert", "lsh:chunk=16")
    assert conversion.record == LshAttention(
        layers=("lsh", "lsh"),
        hashes=Hashes(buckets=(32,), rounds=4, seed=0),
        hashed=Chunks(tokens=16, before=1, after=0),
        local=None,
        multiple=16,
        converted=True,
    )
    assert conversion.padding is None
    assert conversion.note.startswith(
        "Experimental: attention is among tokens of alike hashes, which the model was not"
    )
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        conversion_of("bert", "lsh:chunk=300")
    assert "Chunks of 300 tokens cover every text of up to 300 tokens: the attention is dense" in caplog.text


def test_attention_that_is_no_softmax_over_all_keys_is_not_exchanged(conversion_of) -> None:
    with pytest.raises(
        ModelError, match=r"mpnet cannot be converted to LSH attention(.|\n)*types that can be converted: albert"
    ):
        conversion_of("mpnet", "lsh")


def test_a_config_that_describes_no_attention_is_refused() -> None:
    for changes, message in (
        ({"num_buckets": 7}, "num_buckets 7; it must be an even number, or a list of them"),
        ({"num_hashes": 0}, "num_hashes 0; it must be 1 or more"),
        ({"local_num_chunks_after": -1}, "local_num_chunks_after -1; it must be 0 or more"),
        ({"attn_layers": ["lsh", "sparse"]}, r"attn_layers \['lsh', 'sparse'\]; a layer is lsh or local"),
    ):
        config = ReformerConfig(**{"attn_layers": ["local", "lsh"], **changes})
        with named_case(changes), pytest.raises(ModelError, match=message):
            family_of("reformer").native_record("lsh", config)


@torch.inference_mode()
def test_axial_positions_become_the_table_that_they_stand_for(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "reformer", Task.FEATURE_EXTRACTION, axial_pos_shape=[2, 32])
    axial = model.embeddings.position_embeddings
    assert isinstance(axial, AxialPositionEmbeddings)
    expected = axial(torch.arange(BASE)[None])[0]
    family_of("reformer").prepare(model)
    assert torch.equal(model.embeddings.position_embeddings.weight, expected)


def test_axial_positions_that_are_too_few_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "reformer", Task.FEATURE_EXTRACTION, axial_pos_shape=[4, 8])
    with pytest.raises(ModelError, match=r"4 x 8 makes 32.\nSet max_position_embeddings to 32"):
        family_of("reformer").prepare(model)


def test_a_table_is_extended_as_a_checkpoint_and_axial_positions_are_not(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "axial", "reformer", Task.FEATURE_EXTRACTION)
    with pytest.raises(ModelError, match=r"computed from several tables(.|\n)*hdexport build"):
        extend(ExtendOptions(model=tmp_path / "axial", output=tmp_path / "longer", max_len=100))
    save_tiny_model(tmp_path / "table", "reformer", Task.FEATURE_EXTRACTION, axial_pos_embds=False)
    extend(ExtendOptions(model=tmp_path / "table", output=tmp_path / "longer", max_len=100))
    model = find_checkpoint(tmp_path / "longer").load(Task.FEATURE_EXTRACTION)
    assert model.embeddings.position_embeddings.embedding.weight.shape == (100, 32)


def test_a_decoder_is_causal_and_other_families_have_none(conversion_of, tmp_path: Path) -> None:
    assert conversion_of("reformer", None, is_decoder=True)[0].record == dataclasses.replace(OWN, causal=True)
    find_checkpoint(tmp_path / "model")
    save_tiny_model(tmp_path / "bert", "bert", Task.FEATURE_EXTRACTION, is_decoder=True)
    with pytest.raises(ModelError, match="says is_decoder"):
        find_checkpoint(tmp_path / "bert")


def problems_of(record: LshAttention) -> list[str]:
    return list(attention_type_named("lsh").problems(record, manifest=None))


def test_a_record_that_contradicts_itself_is_found() -> None:
    assert problems_of(OWN) == []
    assert problems_of(dataclasses.replace(OWN, hashes=None)) == [".layers has layers lsh, and their record is missing"]
    assert problems_of(dataclasses.replace(OWN, multiple=24)) == [".multiple 24 is no multiple of a chunk's 16 tokens"]
    odd = dataclasses.replace(OWN.hashes, buckets=(4, 5))
    assert problems_of(dataclasses.replace(OWN, hashes=odd)) == [".hashes.buckets has an odd number"]


# Decisions, and recall.

TOKENS = 21


def hashed_by(
    decisions: LshDiscreteOutputs | None, vectors: torch.Tensor, buckets: tuple[int, ...], mask: torch.Tensor
) -> torch.Tensor:
    """[rounds, tokens], the library's buckets of [tokens, 16] vectors, in one head; without their rounds' offsets."""
    factors = buckets[0] if len(buckets) == 1 else list(buckets)
    config = ReformerConfig(num_attention_heads=1, attention_head_size=16, num_buckets=factors, hash_seed=3)
    attention = LSHSelfAttention(config)
    if decisions is not None:
        decisions.use(attention)
        decisions.begin_layer(0)
    found = attention._hash_vectors(vectors[None, None], 2, mask).view(2, -1)
    return found - torch.arange(2)[:, None] * (math.prod(buckets) + (not mask.all()))


@pytest.mark.parametrize(("buckets", "padding"), [((8,), 4), ((4, 6), 0)])
def test_a_decision_is_followed_and_is_wrong_unless_products_are_close(buckets: tuple[int, ...], padding: int) -> None:
    record = dataclasses.replace(OWN, hashes=Hashes(buckets=buckets, rounds=2, seed=3))
    rotations = draw_rotations(3, heads=1, head_dim=16, buckets=buckets, rounds=2)
    decisions = LshDiscreteOutputs(record, rotations)
    # As far along one direction as against another, which no third one comes near to.
    basis = rotations[0, :, 0, :2]
    tie = basis @ torch.linalg.solve(basis.mT @ basis, torch.tensor([50.0, -50.0]))
    others = torch.randn(TOKENS - 1 + padding, 16, generator=torch.Generator().manual_seed(0))
    vectors = torch.stack([tie, *others])
    mask = (torch.arange(TOKENS + padding) < TOKENS).long()[None]
    own = hashed_by(None, vectors, buckets, mask)
    assert torch.equal(hashed_by(decisions, vectors, buckets, mask), own)

    def followed(changed: torch.Tensor) -> list[str]:
        """What is said of a graph that decided so about the text, which is the second of two."""
        given = torch.stack([torch.zeros_like(changed), changed])[:, None].numpy()
        with decisions.follow([given], row=1, tokens=slice(0, TOKENS)):
            got = hashed_by(decisions, vectors, buckets, mask)
        assert torch.equal(got[:, :TOKENS], changed[:, :TOKENS])
        assert torch.equal(got[:, TOKENS:], own[:, TOKENS:])
        return decisions.take_wrong()

    assert followed(own) == []
    choices = {0, buckets[0] // 2 + 1}
    (other,) = choices - {int(own[0, 0]) % buckets[0]}
    turned = own.clone()
    turned[0, 0] += other - own[0, 0] % buckets[0]
    assert followed(turned) == []
    # A bucket that the same vector is far from, one that there is not, and what another token decided.
    for token, bucket in ((0, turned[0, 0] ^ 1), (5, math.prod(buckets)), (5, -1)):
        wrong = own.clone()
        wrong[0, token] = bucket
        assert followed(wrong) == ["1 tokens in a bucket of a smaller product"]
    assert followed(own.roll(1, dims=1).where(mask.bool(), own)) != []
    assert decisions.take_wrong() == []


def recall_of(conversion_of: Callable, spec: str) -> str:
    conversion, model = conversion_of("bert", spec)
    rotations = conversion.rotations(model)
    use_hashes(model, conversion.record, rotations, conversion.dtype)
    ids = torch.randint(5, 100, (1, 257), generator=torch.Generator().manual_seed(0))
    (line,) = recall(model, conversion.record, rotations, ids)
    return line


def test_recall_is_whole_where_every_key_is_seen_and_grows_with_rounds(conversion_of) -> None:
    assert recall_of(conversion_of, "lsh:chunk=300") == (
        "LSH attention sees 100% of the 16 keys with the largest scores of each query; by layer 100% to 100%"
    )
    shares = [
        int(recall_of(conversion_of, f"lsh:chunk=16,rounds={rounds}").partition("%")[0].rpartition(" ")[2])
        for rounds in (1, 16)
    ]
    assert 10 < shares[0] < shares[1] < 100
