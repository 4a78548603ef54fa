"""A program that embeds texts of given lengths, by hdruntime or by ONNX Runtime alone, on any machine.

Arguments: BUNDLE OUTPUT.npz LENGTHS, then `session` BACKEND PRECISION or `graph` FILE. Writes the embeddings, one array
[1, hidden size] for each length. What a session refuses is printed, and nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

WORDS = """engineers measure the distance between long documents and short questions in many languages while a brown fox
jumps over seven lazy dogs near the old harbour of a quiet town"""


def text_of(words: int) -> str:
    """A text of so many words, other words for each length."""
    known = WORDS.split()
    return " ".join(known[(7 * index + words) % len(known)] for index in range(words))


def embedder(bundle: str, how: str, *options: str) -> Callable[[str], Any]:
    """What embeds a text, with one thread."""
    if how == "session":
        import hdruntime

        backend, precision = options
        session = hdruntime.load(bundle, backend, precision=precision, threads=1)
        return lambda text: session.embed([text])
    import onnxruntime
    from tokenizers import Tokenizer

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    (file,) = options
    graph = onnxruntime.InferenceSession(f"{bundle}/{file}", settings, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(f"{bundle}/tokenizer.json")

    def embed(text: str) -> Any:
        ids = np.array([tokenizer.encode(text).ids])
        return graph.run(["sentence_embedding"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]

    return embed


def main(bundle: str, output: str, lengths: str, *how: str) -> None:
    """See the module."""
    try:
        embed = embedder(bundle, *how)
    except ImportError:
        raise
    except Exception as error:
        print(type(error).__name__, error)
        return
    np.savez(output, **{words: embed(text_of(int(words))) for words in lengths.split(",")})


if __name__ == "__main__":
    main(*sys.argv[1:])
