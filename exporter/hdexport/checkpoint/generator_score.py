"""A generator that scores texts by its logits of one or two tokens: one row stands for its vocabulary."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hdexport.checkpoint.sentence_modules import LogitScore
from hdexport.families.qwen3 import last_read
from hdruntime.errors import ModelError, Setting

_ROUNDING = 1e-4
"""Part of the largest logit by which a score may differ from the generator's own."""


@torch.inference_mode()
def score_by_logits(generator: PreTrainedModel, score: LogitScore, *, path: Path) -> None:
    """Makes a float32 generator a classifier of one label, in place, whose answer is the score of a text's last token.

    A generator whose logits are not the product of a token's vector and the head's rows is rejected. `path` is the
    checkpoint's, for messages.
    """
    head: Any = generator.get_output_embeddings()
    for token_id in (score.true_token_id, score.false_token_id):
        if token_id is not None and token_id >= len(head.weight):
            raise ModelError(
                f"The checkpoint's LogitScore reads the logit of the token {token_id}, and the model has "
                f"{len(head.weight)} tokens.",
                hint="Set true_token_id and false_token_id to ids of its tokenizer, or download the model again.",
            )
    ids = torch.arange(3)[None] % len(head.weight)
    logits = generator(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, -1].float()
    generator.set_output_embeddings(_one_row(head, score))
    generator.forward = functools.partial(_score, generator)
    expected, found = _of_tokens(logits, score), generator(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if not torch.allclose(found[:, 0], expected, rtol=0.0, atol=_ROUNDING * float(logits.abs().amax().clamp(min=1.0))):
        raise ModelError(
            f"{path} is scored by logits of a {generator.config.model_type} (LogitScore), which are not the "
            "product of the last token's state and a row for each token: a layer, a factor or a cap changes them.",
            hint=("Build its Transformer alone: ", Setting("task", "feature-extraction")),
        )


def _one_row(head: Any, score: LogitScore) -> torch.nn.Linear:
    """The layer that gives the score of a token's vector, as the vocabulary's head gives its logits."""
    row = torch.nn.Linear(head.weight.shape[1], 1, bias=getattr(head, "bias", None) is not None)
    row.weight.copy_(_of_tokens(head.weight.T, score)[None])
    if row.bias is not None:
        row.bias.copy_(_of_tokens(head.bias, score))
    return row


def _of_tokens(logits: torch.Tensor, score: LogitScore) -> torch.Tensor:
    """The score of logits, or of what is multiplied or added to them, whose last axis is the vocabulary's."""
    true = logits[..., score.true_token_id]
    return true if score.false_token_id is None else true - logits[..., score.false_token_id]


def _score(generator: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *, return_dict: bool = True) -> Any:
    """A forward pass for the score of each text's last real token, whatever its id is: [batch, 1]."""
    assert return_dict, "there is no other form"
    states = generator.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    last = last_read(states, input_ids, attention_mask, None)
    return SequenceClassifierOutput(logits=generator.get_output_embeddings()(last))
