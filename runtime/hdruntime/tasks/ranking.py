"""Documents ranked by a reranker's scores of each with a query."""

from __future__ import annotations

__all__ = ["ranking"]

import functools
from collections.abc import Sequence

from hdruntime.inference.pair_logits import PairOptions, check_query, pair_logits, ranked
from hdruntime.inference.text_runner import TextRunner
from hdruntime.text.classes import activation_of, check_reranker
from hdruntime.text.logits import activated
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.splitting import SplitPooling
from hdruntime.text.tokenization import Overflow


def ranking(
    runner: TextRunner,
    query: str,
    documents: Sequence[str],
    *,
    top_k: int | None,
    return_documents: bool,
    overflow: Overflow | str,
    stride: int,
    split_pooling: SplitPooling | str,
    batch_tokens: int | None,
    prompt_name: str | None,
    prompt: str | None,
) -> list[dict[str, int | float | str]]:
    """See :meth:`hdruntime.Session.rank`."""
    check_reranker(runner.manifest)
    prompt = chosen_prompt(*prompts_of(runner.manifest), name=prompt_name, prompt=prompt)
    options = PairOptions(overflow=overflow, stride=stride, split_pooling=split_pooling, prompt=prompt)
    check_query(query, runner.tokenizer, options)
    logits = pair_logits(
        [(query, document) for document in documents],
        runner.tokenizer,
        functools.partial(runner.run_batches, batch_tokens=batch_tokens, outputs=["logits"]),
        labels=1,
        options=options,
        name="documents",
    )
    scores = activated(logits, activation_of(runner.bundle))[:, 0]
    return ranked(scores, documents, top_k=top_k, return_documents=return_documents)
