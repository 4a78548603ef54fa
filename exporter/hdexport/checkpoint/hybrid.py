"""The head of a model such as BGE-M3, which gives each text a vector, and each token a weight and a vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hdexport.checkpoint.bge_m3 import COLBERT, SPARSE, SUFFIXES, head_file
from hdexport.checkpoint.trust import Trust
from hdexport.checkpoint.weight_files import pickle_rejected, read_weights
from hdexport.model.graph_module import Head
from hdruntime.errors import ModelError, Setting


class HybridHead(Head):
    """The outputs of hybrid-similarity, as FlagEmbedding's ``BGEM3FlagModel`` computes them.

    Args:
        sentence: head whose only output is the vector of a text.
        sparse: linear layer that gives a token's weight before its ReLU, of width 1.
        colbert: linear layer that gives a token's vector before its normalization.
    """

    def __init__(self, sentence: Head, sparse: torch.nn.Linear, colbert: torch.nn.Linear) -> None:
        super().__init__()
        self.sentence, self.sparse, self.colbert = sentence, sparse, colbert

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The vector of the text, [batch, embedding_size], the weights of its tokens, [batch, tokens, 1], not negative,
        and their vectors, [batch, tokens, token_embedding_size], of length 1; 0 for padding. See `Head.outputs`."""
        states = states.float()
        (sentence,) = self.sentence.outputs(states, attention_mask, pooled_mask)
        # A product would make NaN of a NaN in the padding.
        real = torch.where(attention_mask.unsqueeze(-1) > 0, states, 0.0)
        is_real = attention_mask.unsqueeze(-1).to(states.dtype)
        weights = torch.relu(self.sparse(real)) * is_real
        tokens = torch.nn.functional.normalize(self.colbert(real), p=2.0, dim=-1) * is_real
        return sentence, weights, tokens


def hybrid_head(path: Path, sentence: Head, *, hidden_size: int, trust: Trust) -> HybridHead:
    """The head of a checkpoint in the layout of BAAI/bge-m3: `sentence` and the two files beside the model."""
    return HybridHead(
        sentence,
        _linear(path, SPARSE, hidden_size, 1, trust),
        _linear(path, COLBERT, hidden_size, None, trust),
    )


def unweighted_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids of a transformers tokenizer that FlagEmbedding leaves out of sparse vectors."""
    special = (tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return tuple(sorted({token for token in special if token is not None}))


def _linear(path: Path, name: str, inputs: int, outputs: int | None, trust: Trust) -> torch.nn.Linear:
    """The linear layer of a file with `outputs` outputs, or with any number for None."""
    file = head_file(path, name)
    if file is None:
        raise ModelError(
            f"{path} has no {' or '.join(f'{name}{suffix}' for suffix in SUFFIXES)}, which hybrid-similarity needs.",
            hint=("Build its text embeddings: ", Setting("task", "sentence-similarity"), "."),
        )
    if file.suffix != ".safetensors" and not trust.allow_pickle:
        raise pickle_rejected(file)
    weights = read_weights(file)
    weight, bias = weights.get("weight"), weights.get("bias")
    sizes = None if weight is None else list(weight.shape)
    fits = sizes is not None and len(sizes) == 2 and sizes[1] == inputs and outputs in (None, sizes[0])
    if weight is None or bias is None or not fits or list(bias.shape) != [weight.shape[0]]:
        raise ModelError(
            f"{file} needs weight, [{outputs or 'dimensions'}, {inputs}], and bias, and has weight {sizes}.",
            hint="Download the model again.",
        )
    if not all(each.is_floating_point() and each.isfinite().all() for each in (weight, bias)):
        raise ModelError(f"{file} has weights that are integers, NaN or infinite.", hint="Download the model again.")
    layer = torch.nn.Linear(inputs, weight.shape[0])
    layer.load_state_dict({"weight": weight.float(), "bias": bias.float()})
    return layer.eval()
