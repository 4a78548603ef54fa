"""Hugging Face's own answers at any length, by transformers and the definition alone: nothing of hdexport is used."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers

ALPHA = 0.4

AFTER_PADDING_ROW = (
    "camembert",
    "data2vec-text",
    "longformer",
    "luke",
    "mpnet",
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Model types whose first position is the row after the padding row."""

_BLOCK_SPARSE = ("big_bird", "bigbird_pegasus")
"""Model types that a short text turns into dense ones for good."""

_COMPUTED_POSITIONS = (
    "embedding_gemma2_text",
    "eurobert",
    "gemma3_text",
    "gte",
    "jina_embeddings_v3",
    "longt5",
    "modernbert",
    "modernbert-decoder",
    "mt5",
    "neomme",
    "nezha",
    "nomic_bert",
    "qwen3",
    "t5",
    "transfo-xl",
    "ultrabert",
    "umt5",
    "xlnet",
)
"""Model types without a table of positions: any length is computed."""

_CLASS_OF_TASK = {
    "feature-extraction": transformers.AutoModel,
    "sentence-similarity": transformers.AutoModel,
    "sparse-similarity": transformers.AutoModelForMaskedLM,
    "fill-mask": transformers.AutoModelForMaskedLM,
    "text-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "text-scoring": transformers.AutoModelForCausalLM,
}
_ENCODER_CLASSES = {
    "longt5": transformers.LongT5EncoderModel,
    **dict.fromkeys(("mt5", "t5", "umt5"), transformers.AutoModelForTextEncoding),
}
"""Model types whose AutoModel has a decoder as well -> the class that loads the encoder alone."""

_OUTPUTS_OF_TASK = {
    "feature-extraction": ("last_hidden_state",),
    "question-answering": ("start_logits", "end_logits"),
    "text-scoring": ("log_probabilities",),
}


def _has_no_table(config: transformers.PreTrainedConfig) -> bool:
    """Whether a model lacks a table of positions, whose type's checkpoints may have one: ESM and DeBERTa."""
    is_rotary = getattr(config, "position_embedding_type", None) == "rotary"
    return is_rotary or not getattr(config, "position_biased_input", True)


def extended_rows(rows: np.ndarray, max_len: int, *, alpha: float = ALPHA) -> np.ndarray:
    """The first `max_len` hierarchical positions of [n, width] rows, float64, by the definition as it is written."""
    p = rows.astype(np.float64)
    u = (p - alpha * p[0]) / (1 - alpha)
    blocks = -(-max_len // len(u))  # of i, that the first `max_len` rows reach
    q = alpha * u[:blocks, None, :] + (1 - alpha) * u[None, :, :]  # [i, j, width]
    return q.reshape(-1, rows.shape[1])[:max_len]


def first_real_tokens(attention_mask: np.ndarray) -> np.ndarray:
    """int64 [batch, tokens], 1 for the first real token of each row."""
    marks = np.zeros_like(attention_mask)
    for row, real in zip(marks, attention_mask, strict=True):
        if real.any():
            row[np.flatnonzero(real)[0]] = 1
    return marks


class HuggingFace:
    """A checkpoint in transformers, float32, its position table replaced by one of `max_len` positions."""

    def __init__(self, directory: Path, task: str, *, max_len: int, alpha: float = ALPHA) -> None:
        self.task = task
        with_head = _CLASS_OF_TASK[task]
        encoder_class = _ENCODER_CLASSES.get(json.loads((directory / "config.json").read_text())["model_type"])
        loads = encoder_class if encoder_class and with_head is transformers.AutoModel else with_head
        self.model = loads.from_pretrained(directory, dtype=torch.float32).eval()
        model_type = self.model.config.model_type
        if model_type in ("led", "bigbird_pegasus"):
            self.model = self.model.encoder
            self._extend_encoder(max_len, alpha)
        elif model_type == "reformer":
            self._extend_reformer(max_len, alpha)
        elif model_type == "performer":
            table = self.model.pos_emb.emb
            self.checkpoint_rows = table.weight.detach().numpy().copy()
            table.weight = torch.nn.Parameter(
                torch.from_numpy(extended_rows(self.checkpoint_rows, max_len, alpha=alpha).astype(np.float32))
            )
        elif model_type == "roformer":
            self._extend_roformer(max_len)
        elif model_type not in _COMPUTED_POSITIONS and not _has_no_table(self.model.config):
            self._extend(max_len, alpha)

    def _extend(self, max_len: int, alpha: float) -> None:
        embeddings = self.model.base_model.embeddings
        table = embeddings.position_embeddings.weight.detach().numpy()
        first_row = 2 if self.model.config.model_type in (*AFTER_PADDING_ROW, "esm") else 0
        self.checkpoint_rows = table.copy()
        if self.model.config.model_type == "big_bird":
            # BigBird pads texts to a multiple of the block, and the padding has positions.
            max_len += -max_len % self.model.config.block_size
            self.model.config.max_position_embeddings = max_len
        rows = extended_rows(table[first_row:], max_len, alpha=alpha).astype(np.float32)
        weight = torch.from_numpy(np.concatenate([table[:first_row], rows]))
        embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(weight)
        embeddings.position_ids = torch.arange(len(weight))[None]
        embeddings.token_type_ids = torch.zeros(1, len(weight), dtype=torch.long)

    def _extend_encoder(self, max_len: int, alpha: float) -> None:
        table = self.model.embed_positions.weight.detach().numpy()
        self.checkpoint_rows = table.copy()
        if self.model.config.model_type == "led":
            # LED pads texts to a multiple of the window, and the padding has positions.
            max_len += -max_len % max(self.model.config.attention_window)
        else:
            self.model.config.max_position_embeddings = max_len
        rows = extended_rows(table, max_len, alpha=alpha).astype(np.float32)
        self.model.embed_positions.weight = torch.nn.Parameter(torch.from_numpy(rows))

    def _extend_roformer(self, max_len: int) -> None:
        encoder = self.model.base_model.encoder
        table = type(encoder.embed_positions)(max_len, encoder.embed_positions.embedding_dim)
        table.weight = torch.nn.Parameter(table.create_weight(), requires_grad=False)
        encoder.embed_positions = table

    def _extend_reformer(self, max_len: int, alpha: float) -> None:
        """In float64, too, but for hashes: the -1e5 for a token's own key leaves float32 weights two decimals."""
        config, embeddings = self.model.config, self.model.base_model.embeddings
        with torch.inference_mode():
            every = torch.arange(config.max_position_embeddings)[None]
            self.checkpoint_rows = embeddings.position_embeddings(every)[0].numpy()
        chunks = {getattr(config, f"{kind}_attn_chunk_length") for kind in config.attn_layers}
        max_len += -max_len % math.lcm(*chunks)
        rows = extended_rows(self.checkpoint_rows, max_len, alpha=alpha).astype(np.float32)
        embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(torch.from_numpy(rows))
        embeddings.max_position_embeddings = max_len
        self.model.double()
        for module in self.model.modules():
            if hasattr(module, "_hash_vectors"):
                hashes = module._hash_vectors
                module._hash_vectors = lambda vectors, *rest, hashes=hashes: hashes(vectors.float(), *rest)

    def _renew(self) -> None:
        """Remake every layer's attention from the current configuration."""
        base = self.model.base_model
        base.set_attention_type("original_full")
        base.set_attention_type(self.model.config.attention_type)

    def _summarise_last(self, attention_mask: np.ndarray) -> None:
        """Make XLNet's classifier read the last real token, by the library's own option, instead of the last of all."""
        summary = self.model.sequence_summary
        last = [np.flatnonzero(row)[-1] for row in attention_mask]
        summary.summary_type = "cls_index"
        summary.forward = functools.partial(type(summary).forward, summary, cls_index=torch.tensor(last))

    def _read_first(self, attention_mask: np.ndarray) -> None:
        """Make DeBERTa's classifier read the first real token, instead of the first of all, which may be padding."""
        pooler = self.model.pooler
        first = torch.tensor([np.flatnonzero(row)[0] for row in attention_mask])
        pooler.forward = lambda states: type(pooler).forward(pooler, states[torch.arange(len(first)), first][:, None])

    def __call__(
        self, input_ids: np.ndarray, attention_mask: np.ndarray, **others: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Outputs by name for int64 [batch, tokens] inputs; sentence-similarity pools by mean, sparse by max."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **others}
        if self.model.config.model_type == "longformer" and self.task == "text-classification":
            # The library marks the first of all tokens, which may be padding.
            inputs.setdefault("global_attention_mask", first_real_tokens(attention_mask))
        if self.model.config.model_type in _BLOCK_SPARSE:
            self._renew()
        if self.model.config.model_type == "xlnet" and self.task == "text-classification":
            self._summarise_last(attention_mask)
        if self.model.config.model_type in ("deberta", "deberta-v2") and self.task == "text-classification":
            self._read_first(attention_mask)
        if self.model.config.model_type in ("modernbert-decoder", "qwen3") and self.task == "text-classification":
            # Causal classifiers read the last token whose id is not padding's, even against the mask.
            inputs["input_ids"] = np.where(attention_mask == 1, input_ids, self.model.config.pad_token_id)
        with torch.inference_mode():
            outputs = self.model(**{name: torch.from_numpy(ids) for name, ids in inputs.items()})
        if self.task == "sparse-similarity":
            logits = [row[real == 1] for row, real in zip(outputs.logits.float().numpy(), attention_mask, strict=True)]
            return {"sparse_embedding": np.log1p(np.stack([np.maximum(row, 0).max(axis=0) for row in logits]))}
        if self.task != "sentence-similarity":
            return {name: outputs[name].float().numpy() for name in _OUTPUTS_OF_TASK.get(self.task, ("logits",))}
        tokens = outputs.last_hidden_state.numpy()
        mean = np.stack([row[real == 1].mean(axis=0) for row, real in zip(tokens, attention_mask, strict=True)])
        embedding = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return {"last_hidden_state": tokens, "sentence_embedding": embedding}
