"""BGE-M3's heads: read from either kind of file, and refused where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.heads import task_head
from hdexport.checkpoint.hybrid import HybridHead
from hdexport.checkpoint.trust import Trust
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.bge_m3_models import TOKEN_WIDTH, WIDTH, save_bge_m3

TRUSTED = Trust(allow_pickle=True)


def head(path: Path, trust: Trust = TRUSTED) -> HybridHead:
    found = task_head(find_checkpoint(path, trust=trust), Task.HYBRID_SIMILARITY)
    assert isinstance(found, HybridHead)
    return found


def test_the_heads_are_read_from_pickles_and_safetensors(tmp_path: Path) -> None:
    save_bge_m3(tmp_path)
    pickled = head(tmp_path)
    assert pickled.colbert.weight.shape == (TOKEN_WIDTH, WIDTH)
    with pytest.raises(ModelError, match=r"sparse_linear.pt is a pickle(.|\n)*allow_pickle"):
        head(tmp_path, Trust())
    for name in ("sparse", "colbert"):
        file = tmp_path / f"{name}_linear.pt"
        save_file({key: weight.half() for key, weight in torch.load(file).items()}, file.with_suffix(".safetensors"))
        file.unlink()
    converted = head(tmp_path, Trust())
    torch.testing.assert_close(converted.colbert.weight, pickled.colbert.weight, rtol=0, atol=1e-3)
    assert converted.sparse.weight.dtype is torch.float32


def test_padding_has_no_weight_and_no_vector(tmp_path: Path) -> None:
    save_bge_m3(tmp_path)
    states = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    module = head(tmp_path)
    with torch.no_grad():
        whole = module.outputs(states[:1, :3], mask[:1, :3], None)
        states[0, 3:] = torch.nan
        sentence, weights, tokens = (each[0] for each in module.outputs(states, mask, None))
    torch.testing.assert_close(sentence, whole[0][0])
    torch.testing.assert_close(weights[:3], whole[1][0])
    torch.testing.assert_close(tokens[:3], whole[2][0])
    assert not weights[3:].any()
    assert not tokens[3:].any()
    torch.testing.assert_close(tokens[:3].norm(dim=-1), torch.ones(3))


Weights = dict[str, torch.Tensor]
WRONG: dict[str, tuple[str, Callable[[Weights], Weights] | None, str]] = {
    "no sparse head": ("sparse", None, r"no sparse_linear.safetensors or sparse_linear.pt(.|\n)*sentence-similarity"),
    "no colbert head": ("colbert", None, "no colbert_linear.safetensors"),
    "no bias": ("sparse", lambda weights: {"weight": weights["weight"]}, r"needs weight, \[1, 32\], and bias"),
    "another width": ("colbert", lambda weights: weights | {"weight": weights["weight"][:, 1:]}, r"\[24, 31\]"),
    "many weights": ("sparse", lambda _: torch.nn.Linear(WIDTH, 2).state_dict(), r"\[1, 32\], and bias, .*\[2, 32\]"),
    "a vector": ("sparse", lambda weights: weights | {"weight": weights["weight"][0]}, r"has weight \[32\]"),
    "not finite": ("colbert", lambda weights: weights | {"bias": weights["bias"] * torch.nan}, "NaN or infinite"),
    "integers": ("sparse", lambda weights: {name: each.int() for name, each in weights.items()}, "are integers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_heads_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    name, change, said = WRONG[case]
    save_bge_m3(tmp_path)
    file = tmp_path / f"{name}_linear.pt"
    if change is None:
        file.unlink()
    else:
        torch.save(change(torch.load(file)), file)
    with pytest.raises(ModelError, match=said):
        head(tmp_path)


def test_a_checkpoint_without_modules_is_refused(tmp_path: Path) -> None:
    save_bge_m3(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(ModelError, match=r"chains the modules \(none\)"):
        head(tmp_path)
