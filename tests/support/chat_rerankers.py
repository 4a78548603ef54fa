"""Tiny random rerankers whose pairs are written by a chat template, saved by sentence-transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

POSITIONS = 160

_ROLE = '{{{{ messages | selectattr("role", "eq", "{}") | map(attribute="content") | first }}}}'

INSTRUCTED = (
    "<|im_start|>system\nJudge the Document: yes or no.<|im_end|>\n<|im_start|>user\n"
    '<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("Find passages that answer the query") }}\n'
    f"<Query>: {_ROLE.format('query')}\n<Document>: {_ROLE.format('document')}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
"""A template like Qwen3-Reranker's: the prompt is an instruction, and replaces the template's own instruction."""

NO_SYSTEM = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content[0].text + '<|endoftext|>' }}"
    "{% endfor %}{% if add_generation_prompt %}\nScore?<|endoftext|>{% endif %}"
)
"""A template of structured messages, with a loop over them, without a prompt; it ends with the id of padding."""

DIGRESSING = "Document: " + _ROLE.format("document") + "\nIs it about " + _ROLE.format("query") + "?"
"""The document before the query, which almost ends it; prompts are left out."""

QWEN3_RERANKER = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    '<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("Given a web search query, retrieve relevant passages that answer the query") }}\n'
    f"<Query>: {_ROLE.format('query')}\n<Document>: {_ROLE.format('document')}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
"""What the code on Qwen3-Reranker's model card writes, https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.

Jinja takes one line end off the end.
"""

MXBAI_RERANK = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    '<|im_start|>user\n{% for message in messages if message.role == "system" %}instruction: {{ message.content }}\n'
    f"{{% endfor %}}query: {_ROLE.format('query')}\ndocument: {_ROLE.format('document')}\n"
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment "
    "(0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n\n"
)
"""What mixedbread's own code writes, mxbai_rerank/mxbai_rerank_v2.py of https://github.com/mixedbread-ai/mxbai-rerank."""

_WORDS = (
    "yes\nno\n" * 2000
    + "Berlin had many people who live there and read about rivers, museums and the population of the city. " * 20
    + "<Instruct>: <Query>: <Document>: Judge the Document, find passages that answer the query. " * 20
)


def small_tokenizer(positions: int) -> Any:
    """Qwen's tokenizer with a vocabulary of a few hundred: its normaliser, words and bytes."""
    tokenizer = transformers.Qwen2Tokenizer().train_new_from_iterator([_WORDS], 420, show_progress=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.model_max_length = positions
    return tokenizer


def save_chat_reranker(
    directory: Path,
    *,
    template: str | None,
    score: str = "logits",
    tied: bool = True,
    rendering: dict[str, Any] | None = None,
    answers: tuple[str, str] = ("yes", "no"),
    has_modules: bool = True,
    model_type: str = "qwen3",
    positions: int = POSITIONS,
    **options: Any,
) -> None:
    """Write a reranker.

    Args:
        directory: where to.
        template: the tokenizer's chat template; None for none: the tokenizer reads pairs.
        score: ``logits``: the logit of the first answer less that of the second, or ``yes``: of the first alone, both
            of a generator; or ``classifier``: of a classifier's head.
        tied: whether the vocabulary's head is the table of embeddings.
        rendering: options of ``apply_chat_template`` that the checkpoint asks for.
        answers: the tokens, "yes" and "no" unless another module is saved.
        has_modules: whether sentence-transformers saves it; else transformers alone.
        model_type: one of Qwen's.
        positions: the most tokens.
        options: of `sentence_transformers.CrossEncoder`.
    """
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore

    tokenizer = small_tokenizer(positions)
    tokenizer.chat_template = template
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=positions,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    is_classifier = score == "classifier"
    kind = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModelForCausalLM
    base = directory.with_name(f"{directory.name}-base") if has_modules else directory
    kind.from_config(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    if not has_modules:
        return
    reranker = CrossEncoder(str(base), device="cpu", **options)
    if not is_classifier:
        true, false = tokenizer.convert_tokens_to_ids(answers)
        reranker[1] = LogitScore(true_token_id=true, false_token_id=None if score == "yes" else false)
    if rendering is not None:
        reranker[0].processing_kwargs = {"chat_template": rendering}
    reranker.save_pretrained(str(directory))
