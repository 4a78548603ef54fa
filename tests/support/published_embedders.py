"""Tiny random embedders in the layouts of published ones that were generators: what sentence-transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers

from support.tiny_models import change_json

POSITIONS = 128

WIDTH = 32

_WORDS = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: " * 20
    + "Berlin had many people who live there and read about rivers, museums and the population of the city. " * 20
)

_TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"


class Layout(NamedTuple):
    """A published embedder.

    Attributes:
        card: its model card.
        config: values of ``config.json`` beside the sizes.
        architectures: the class that ``config.json`` names.
        prompts: by name.
        beginning, end: the special tokens around a text; empty for none.
        pooling: of the text's tokens.
        max_seq_length: what its settings say; None where they say nothing.
    """

    card: str
    config: dict[str, Any]
    architectures: str
    prompts: dict[str, str]
    beginning: str = ""
    end: str = ""
    pooling: str = "lasttoken"
    max_seq_length: int | None = None


LAYOUTS = {
    "qwen3-embedding": Layout(
        card="https://huggingface.co/Qwen/Qwen3-Embedding-0.6B",
        config={"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": True},
        architectures="Qwen3ForCausalLM",
        prompts={"query": f"{_TASK}Query:", "document": ""},
        end="<|endoftext|>",
    ),
    "gte-qwen2": Layout(
        card="https://huggingface.co/Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        config={"model_type": "qwen2", "num_key_value_heads": 2, "is_causal": False},
        architectures="Qwen2ForCausalLM",
        prompts={"query": f"{_TASK}Query: "},
        end="<|endoftext|>",
        max_seq_length=90,
    ),
    "e5-mistral": Layout(
        card="https://huggingface.co/intfloat/e5-mistral-7b-instruct",
        config={"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 16, "head_dim": 8},
        architectures="MistralModel",
        prompts={"web_search_query": f"{_TASK}Query: ", "sts_query": "Instruct: Retrieve similar text.\nQuery: "},
        beginning="<s>",
        end="</s>",
        max_seq_length=100,
    ),
    # Llama that sees both sides, pooled by mean.
    "llama-embed": Layout(
        card="https://huggingface.co/nvidia/llama-embed-nemotron-8b",
        config={"model_type": "llama", "num_key_value_heads": 2, "is_causal": False},
        architectures="LlamaModel",
        prompts={"query": f"{_TASK}Query: ", "document": ""},
        beginning="<s>",
        pooling="mean_tokens",
    ),
    "mixture": Layout(
        card="https://huggingface.co/Qwen/Qwen3-30B-A3B",
        config={
            "model_type": "qwen3_moe",
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
        },
        architectures="Qwen3MoeForCausalLM",
        prompts={"query": f"{_TASK}Query:"},
        end="<|endoftext|>",
    ),
    # As embedders are trained of it with sentence-transformers.
    "ettin-decoder": Layout(
        card="https://huggingface.co/jhu-clsp/ettin-decoder-17m",
        config={"model_type": "modernbert-decoder", "local_attention": 16},
        architectures="ModernBertDecoderModel",
        prompts={"query": "search_query: ", "document": "search_document: "},
        beginning="<s>",
        end="</s>",
        max_seq_length=100,
    ),
}


def save_published_embedder(directory: Path, layout: Layout) -> None:
    """Write a tiny random model in a layout: weights, configuration, tokenizer and sentence-transformers' files."""
    tokenizer = _tokenizer(layout)
    torch.manual_seed(2)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.2,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = transformers.AutoConfig.for_model(**sizes | layout.config)
    transformers.AutoModel.from_config(config).save_pretrained(directory)
    change_json(directory / "config.json", architectures=[layout.architectures])
    tokenizer.save_pretrained(directory)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for number, (folder, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for folder in filter(None, kinds):
        (directory / folder).mkdir()
    pooling = {f"pooling_mode_{mode}": mode == layout.pooling for mode in ("cls_token", "mean_tokens", "lasttoken")}
    pooling |= {"word_embedding_dimension": WIDTH, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    settings = {"prompts": layout.prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    if layout.max_seq_length is not None:
        settings = {"max_seq_length": layout.max_seq_length, "do_lower_case": False}
        (directory / "sentence_bert_config.json").write_text(json.dumps(settings))


def _tokenizer(layout: Layout) -> Any:
    """A tokenizer of a few hundred words and bytes, which puts the layout's tokens around a text."""
    special = ["<|endoftext|>", "<s>", "</s>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS], trainer)
    parts = [part for part in (layout.beginning, "$A", layout.end) if part]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join(parts), special_tokens=[(part, tokenizer.token_to_id(part)) for part in parts if part != "$A"]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=layout.beginning or None,
        eos_token=layout.end or None,
        pad_token=layout.end or "<|endoftext|>",
        padding_side="left",
        model_max_length=POSITIONS,
        additional_special_tokens=special,
    )
