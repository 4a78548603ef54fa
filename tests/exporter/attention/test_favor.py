"""What becomes of a request for FAVOR+, and that bundles with it answer, and are verified, as PyTorch with it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from hdexport.attention.favor import FavorAttention
from hdexport.attention.favor.model import attend_by_features
from hdexport.attention.registry import attention_type_named
from hdexport.checkpoint import find_checkpoint
from hdexport.families import family_of
from hdexport.verify import Grid, verify_bundle
from hdexport.verify.pytorch_reference import reference_of
from hdplugins.attention.favor.reference import draw_projection
from hdruntime.bundle.manifest import PaddingRule, Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError, ModelError
from support.commands import run_here
from support.comparators import assert_close
from support.grids import nightly_unless
from support.needs import needs_rtx
from support.tiny_models import save_tiny_model
from support.verified import verified

SPEC = "favor:features=48,seed=3"
OURS = {"attention": SPEC, "attention_scale": "logn"}
"""Its queries are scaled as well; the command below builds and verifies one whose are not."""


def test_attention_that_is_no_softmax_over_all_keys_is_not_exchanged(tiny_bundles) -> None:
    with pytest.raises(
        ModelError, match=r"xlnet cannot be converted to FAVOR\+ attention(.|\n)*types that can be converted: albert"
    ):
        tiny_bundles("xlnet", attention="favor")


def test_the_manifest_says_what_the_graph_has(tiny_bundles) -> None:
    bundle = tiny_bundles("bert", **OURS)
    (record,) = bundle.manifest.attention
    assert record == {
        "type": "favor",
        "layers": 2,
        "features": 48,
        "seed": 3,
        "epsilon": 1e-6,
        "compat": False,
    }
    assert bundle.manifest.padding is None
    model = onnx.load(bundle.path / "model.onnx")
    (projection,) = {node.input[4] for node in model.graph.node if node.op_type == "FavorAttention"}
    (stored,) = (
        onnx.numpy_helper.to_array(item, str(bundle.path))
        for item in model.graph.initializer
        if item.name == projection
    )
    np.testing.assert_array_equal(stored, draw_projection(3, features=48, head_dim=8).numpy())


def test_padding_that_counts_is_never_added() -> None:
    """Rows of other lengths are not put into one batch."""
    record = FavorAttention(layers=2, features=4, seed=0, epsilon=1e-6, compat=True)
    assert attention_type_named("favor").read(record, None).padding == PaddingRule(multiple_of=1)
    assert list(attention_type_named("favor").problems(record, None)) == []


# Bundles.


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bert", {"attention_scale": "logn"}),
        nightly_unless(False, "albert", {}),
        nightly_unless(False, "distilbert", {"task": "text-classification"}),
        nightly_unless(False, "electra", {"precision": "float16"}),
    ],
)
def test_bundles_are_verified_and_say_how_far_they_are_from_a_softmax(tiny_bundles, model_type, changes) -> None:
    found = verified(tiny_bundles(model_type, attention=SPEC, **changes))
    assert found.passed, found.failed
    (line,) = found.information
    pattern = r"FAVOR\+ with 48 features is off softmax attention by (\d+)% of its length; by layer (\d+)% to (\d+)%"
    mean, least, most = map(int, re.match(pattern, line.strip()).groups())
    assert 1 <= least <= mean <= most


@pytest.mark.nightly
def test_padding_counts_if_it_is_asked_for_and_is_verified_so(tiny_bundles) -> None:
    """A performer has its features, and takes the mode only."""
    bundle, right = tiny_bundles("performer", attention="favor:compat"), tiny_bundles("performer")
    (record,) = bundle.manifest.attention
    assert (record["seed"], record["compat"], record["features"], record["epsilon"]) == (None, True, 16, 1e-4)
    found = verified(bundle)
    assert found.passed, found.failed
    assert any(check.case.padding == "right" for check in found.checks)
    ids, mask = padded_ids()
    answers = [each.portable(**feeds_of(each, ids, mask))["last_hidden_state"] for each in (bundle, right)]
    assert np.abs(answers[0][0, :20] - answers[1][0, :20]).max() > 0.01
    # What the runtime never does: it runs such rows alone.
    alone = bundle.session(input_ids=ids[:1, :20])["last_hidden_state"]
    assert_close(alone, right.session(input_ids=ids[:1, :20])["last_hidden_state"], atol=2e-5)


def test_a_batch_with_padding_answers_as_each_text_alone(tiny_bundles) -> None:
    bundle = tiny_bundles("bert", **OURS)
    ids, mask = padded_ids()
    (batch,) = bundle.portable(**feeds_of(bundle, ids, mask)).values()
    assert np.isfinite(batch).all()
    for row, tokens in enumerate(mask.sum(1)):
        (alone,) = bundle.portable(
            **feeds_of(bundle, ids[row : row + 1, :tokens], mask[row : row + 1, :tokens])
        ).values()
        assert_close(batch[row, :tokens], alone[0].astype(np.float64), atol=2e-5)


def padded_ids() -> tuple[np.ndarray, np.ndarray]:
    """[2, 290] ids and mask: 20 and 290 real tokens."""
    ids = np.random.default_rng(0).integers(5, 100, (2, 290))
    return ids, (np.arange(290) < [[20], [290]]).astype(np.int64)


def feeds_of(bundle, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    feeds = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in {spec.name for spec in bundle.manifest.inputs}:
        feeds["token_type_ids"] = np.zeros_like(ids)
    return feeds


def test_the_command_builds_verifies_and_informs(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "bert", "bert", Task.FEATURE_EXTRACTION)
    given = ("bert", "--output", "bundle", "--max-len", "100", "--target", "onnx", "--attention")
    built = run_here("build", *given, "favor:features=32", "--verify", "quick", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    said = built.stdout + built.stderr
    assert re.search(r"^model\.onnx +float32 +PASS ", said, re.MULTILINE)
    assert "FAVOR+ with 32 features is off softmax attention by" in said
    assert "Experimental: 32 random features" in said
    inspected = run_here("inspect", "bundle", cwd=tmp_path).stdout
    assert "FAVOR+ attention" in inspected
    assert "2 layers; 32 features, drawn with seed 0" in inspected


@pytest.mark.nightly
@needs_rtx
def test_tensorrt_rtx_builds_an_engine(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "bert", "bert", Task.FEATURE_EXTRACTION)
    given = ("bert", "--output", "bundle", "--max-len", "600", "--target", "tensorrt-rtx", "--fp16", "--verify", "none")
    built = run_here("build", *given, "--attention", SPEC, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    assert open_bundle(tmp_path / "bundle").manifest.engines


@pytest.mark.parametrize("change", ["projection", "mode"])
def test_verification_finds_a_wrong_graph(tiny_bundles, change: str) -> None:
    """PyTorch is given other features, or padding that counts: then the graph is the wrong one."""
    bundle = tiny_bundles("bert", **OURS)
    opened = open_bundle(bundle.path)
    changes = {"projection": {"seed": 4}, "mode": {"compat": True}}[change]
    opened.manifest.attention[0].update(changes)
    if change == "mode":
        object.__setattr__(opened.manifest, "padding", PaddingRule(multiple_of=1))
    found = verify_bundle(opened, reference_of(opened, find_checkpoint(bundle.checkpoint)), grid=Grid.QUICK)
    assert not found.passed


# The reference.


def test_the_reference_weighs_values_by_products_of_features() -> None:
    """Against weights that are written out, [tokens, tokens]."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 9, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1] * 9, [0, 1, 1, 0, 1, 1, 1, 0, 0]])
    directions = draw_projection(1, features=5, head_dim=4).double()
    for compat in (False, True):
        got = attend_by_features(query, key, value, mask, directions, epsilon=0.01, compat=compat)
        for row in range(2):
            seen = [j for j in range(9) if compat or mask[row, j]]
            left, right = query[row] / 2**0.5, key[row][:, seen] / 2**0.5
            by_query, by_key = left @ directions.mT, right @ directions.mT
            of_query = (
                torch.exp(by_query - by_query.amax(-1, keepdim=True)) / torch.exp(left.norm(dim=-1) ** 2 / 2)[..., None]
            )
            of_key = (
                torch.exp(by_key - by_key.amax((1, 2), keepdim=True))
                / torch.exp(right.norm(dim=-1) ** 2 / 2)[..., None]
            )
            weights = (of_query + 0.01) @ (of_key + 0.01).mT
            weights = weights / weights.sum(-1, keepdim=True)
            expected = weights @ (value[row] * mask[row][:, None])[:, seen]
            torch.testing.assert_close(got[row], expected)


def test_a_performer_is_given_no_other_features(tiny_bundles) -> None:
    assert family_of("performer").conversion_unsupported_reason is not None
    with pytest.raises(InputError, match=r"checkpoint of a performer has its features(.|\n)*favor:compat"):
        tiny_bundles("performer", attention="favor:features=8")
