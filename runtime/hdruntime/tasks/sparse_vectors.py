"""Sparse vectors of texts, by bundles of sparse-similarity."""

from __future__ import annotations

__all__ = ["sparse_vectors"]

from collections.abc import Sequence
from itertools import islice

from hdruntime.inference.text_runner import TextRunner
from hdruntime.tasks.checks import check_task
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.sparse import SPARSE_EMBEDDING, SparseVector, most_active_dims, pooling_of_pieces, sparse_vector
from hdruntime.text.splitting import pooled_logits
from hdruntime.text.tokenization import Overflow


def sparse_vectors(
    runner: TextRunner,
    texts: Sequence[str],
    *,
    max_active_dims: int | None,
    batch_tokens: int | None,
    overflow: Overflow | str,
    stride: int,
    prompt_name: str | None,
    prompt: str | None,
) -> list[SparseVector]:
    """See :meth:`hdruntime.Session.embed_sparse`."""
    manifest = runner.manifest
    check_task(manifest, "sparse-similarity", method="embed_sparse", overflow=overflow)
    limit = most_active_dims(manifest, max_active_dims)
    prompt = chosen_prompt(*prompts_of(manifest), name=prompt_name, prompt=prompt)
    splits = runner.pieces(texts, overflow=overflow, stride=stride, prompt=prompt)
    numbers = [text for text, split in enumerate(splits) for _ in split.pieces]
    pieces = [piece for split in splits for piece in split.pieces]
    # Without zeros at once: zeros of many texts would fill the memory.
    of_piece: dict[int, SparseVector] = {}
    for result in runner.good_batches(pieces, numbers, batch_tokens=batch_tokens, outputs=[SPARSE_EMBEDDING]):
        for piece, weights in zip(result.rows, result.outputs[SPARSE_EMBEDDING], strict=True):
            of_piece[piece] = sparse_vector(weights)
    found = (of_piece[piece] for piece in range(len(pieces)))
    pooling = pooling_of_pieces(manifest)
    dense = (([vector.dense() for vector in islice(found, len(split.pieces))], split) for split in splits)
    wholes = (pooled_logits(split, vectors, pooling) for vectors, split in dense)
    return [sparse_vector(whole, max_active_dims=limit) for whole in wholes]
