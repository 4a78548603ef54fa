"""The results of token-similarity in a batch job: a list of vectors, one for each token that has one."""

from __future__ import annotations

__all__ = ["token_similarity"]

from collections.abc import Sequence

import pyarrow as pa

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.jobs.rows import Row
from hdruntime.jobs.task_results import Outputs, Pairs, ResultOptions, TaskResults, Values
from hdruntime.text.token_vectors import OUTPUT, Side, TextSide, multi_vector_of
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer


def token_similarity(bundle: Bundle, options: ResultOptions) -> TaskResults:
    """The column ``embedding``: float32 [vectors, dimensions] of each text.

    Documents are read as far as the bundle serves; queries as far as the model reads them, and expanded as it does.
    """
    manifest = bundle.manifest
    side = Side.QUERY if options.prompt_name == Side.QUERY.value else Side.DOCUMENT
    rules = TextSide(multi_vector_of(manifest), side)
    is_query = side is Side.QUERY

    def values(outputs: Outputs, encoding: Encoding, row: Row) -> Values:
        return {"embedding": outputs[OUTPUT][rules.has_vector(encoding)]}

    def encode(texts: Sequence[str], overflow: Overflow, prompt: str) -> list[Encoding]:
        most = min(rules.own_length, manifest.max_len)
        whole = overflow is Overflow.ERROR
        tokenizer = TextTokenizer.of(bundle, max_len=manifest.max_len if whole else most)
        encodings = tokenizer.encode(texts, overflow=overflow, prompt=prompt)
        longest = max(map(len, encodings))
        if longest > most:
            raise InputError(
                f"The query has {longest} tokens, special tokens and prompt included; the model reads {most} of a "
                "query.\nCut it: --overflow truncate"
            )
        return [rules.expanded(each) for each in encodings]

    width = next(spec.shape[-1] for spec in manifest.outputs if spec.name == OUTPUT)
    return TaskResults(
        outputs=(OUTPUT,),
        pairs=Pairs.REFUSED,
        fields=(pa.field("embedding", pa.list_(pa.list_(pa.float32(), int(width)))),),
        values=values,
        splits=not is_query,
        streams=False,
        prompts=True,
        default_prompt_name=Side.DOCUMENT.value,
        reads_by_prompt_name=True,
        encode=encode if is_query else None,
    )
