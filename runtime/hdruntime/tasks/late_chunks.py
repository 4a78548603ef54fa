"""Late chunking: texts encoded whole, and the vectors of their chunks."""

from __future__ import annotations

__all__ = ["chunk_embeddings"]

from collections.abc import Sequence

from hdruntime.errors import InputError
from hdruntime.inference.text_runner import TextRunner
from hdruntime.text.chunking import LateChunking, LateChunks, Spans, TextChunks, overlap_of
from hdruntime.text.prompts import chosen_prompt, prompts_of


def chunk_embeddings(
    runner: TextRunner,
    texts: str | Sequence[str],
    *,
    chunks: str | Spans | Sequence[Spans],
    overlap: int | None,
    batch_tokens: int | None,
    prompt_name: str | None,
    prompt: str | None,
) -> TextChunks | list[TextChunks]:
    """See :meth:`hdruntime.Session.embed_chunks`."""
    several = [texts] if isinstance(texts, str) else texts
    of_texts = [chunks] * len(several) if isinstance(chunks, str) or isinstance(texts, str) else chunks
    if len(of_texts) != len(several):
        raise InputError(f"There are {len(several)} texts, but chunks of {len(of_texts)}; give chunks of each.")
    chunking = LateChunking(runner.manifest)
    prompt = chosen_prompt(*prompts_of(runner.manifest), name=prompt_name, prompt=prompt)
    splits = runner.split(several, stride=overlap_of(overlap, runner.max_len), prompt=prompt)
    begun: list[LateChunks] = []
    for number, of_text in enumerate(zip(splits, several, of_texts, strict=True)):
        try:
            begun.append(chunking.begin(*of_text, prompt=prompt))  # type: ignore[arg-type]
        except InputError as error:
            raise InputError(f"Text {number}: {error}" if len(several) > 1 else str(error)) from None
    places = [(text, number) for text, split in enumerate(splits) for number in range(len(split.pieces))]
    pieces = [splits[text].pieces[number] for text, number in places]
    numbers = [text for text, _ in places]
    output = chunking.output.name
    for result in runner.good_batches(pieces, numbers, batch_tokens=batch_tokens, outputs=[output]):
        for index, row in enumerate(result.rows):
            text, number = places[row]
            begun[text].add(number, result.outputs[output][index, : len(pieces[row])])
    found = [each.finished() for each in begun]
    return found[0] if isinstance(texts, str) else found
