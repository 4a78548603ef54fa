"""Scores of generators: one row stands for the vocabulary, and the numbers are the generator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hdexport.checkpoint.generator_score import score_by_logits
from hdexport.checkpoint.sentence_modules import LogitScore
from hdruntime.errors import ModelError
from support.comparators import assert_close


@pytest.mark.parametrize("other", [True, False])
def test_the_score_of_a_generator_is_a_difference_of_its_logits(tmp_path: Path, other: bool) -> None:
    """Of any generator, with any head: here one with a bias, of another family."""
    torch.manual_seed(0)
    config = transformers.PhiConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    generator = transformers.PhiForCausalLM(config).eval()
    torch.nn.init.normal_(generator.lm_head.bias)
    ids, mask = torch.randint(50, (2, 9)), torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    with torch.inference_mode():
        logits = torch.stack([generator(ids[:1]).logits[0, -1], generator(ids[1:, :6]).logits[0, -1]])
        score_by_logits(generator, LogitScore(true_token_id=7, false_token_id=9 if other else None), path=tmp_path)
        found = generator(input_ids=ids, attention_mask=mask).logits
    expected = logits[:, 7] - logits[:, 9] if other else logits[:, 7]
    assert_close(found[:, 0].numpy(), expected.numpy(), atol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(found[:, 0].numpy(), logits[:, 8].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("gemma2", {"head_dim": 8, "num_key_value_heads": 1, "final_logit_softcapping": 0.5}), ("bert", {})],
)
def test_a_generator_that_changes_its_logits_is_refused(tmp_path: Path, model_type: str, sizes: dict[str, Any]) -> None:
    """By a cap, and by a layer before its head."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | sizes
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    generator = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=rf"a {model_type} \(LogitScore\), which are not .* changes them\.\nBuild its"):
        score_by_logits(generator, LogitScore(true_token_id=7, false_token_id=9), path=tmp_path)
