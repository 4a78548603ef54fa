"""The inputs of `benchmarks.cpu.feeding`: corpora of real prose, and bundles of one layer for several tasks."""

from __future__ import annotations

import csv
import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.texts import HELP, tokenizer_of

MAX_LEN = 8192
BUNDLES = ("similarity", "classes", "sparse", "token-vectors")
"""The tasks of the bundles, whose answers are a vector, scores, a sparse vector, or a vector for each token."""

_CORPORA: Mapping[str, tuple[int, int, int]] = {
    "short": (20_000, 4, 20),
    "mixed": (2000, 8, 1200),
    "long": (400, 3000, 3000),
}
"""Name -> texts, fewest and most words of a text."""

CORPORA = tuple(_CORPORA)
_WARM = 20
"""Every so many texts of a corpus has one in the corpus that warms up."""

_HIDDEN, _TOKEN_DIMENSIONS = 384, 128


def checkpoint_of(folder: Path, bundle: str) -> Path:
    """The checkpoint of a bundle."""
    return folder / f"{bundle}-checkpoint"


def make_corpus(folder: Path, name: str, *, part: float, tokenizer: Path) -> dict[str, int]:
    """Write a corpus, and the one that warms up, as JSON Lines, CSV and Parquet; the number of its texts and tokens."""
    texts = _texts(name, part)
    for stem, some in ((name, texts), (f"{name}-warm", texts[: max(4, len(texts) // _WARM)])):
        with (folder / f"{stem}.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(some))
        with (folder / f"{stem}.csv").open("w", encoding="utf-8", newline="") as table:
            csv.writer(table).writerows([("id", "text"), *enumerate(some)])
        pq.write_table(pa.table({"id": list(range(len(some))), "text": some}), folder / f"{stem}.parquet")
    return {"texts": len(texts), "tokens": sum(map(len, tokenizer_of(tokenizer).encode_batch_fast(texts)))}


def texts_of(folder: Path, corpus: str) -> list[str]:
    """The texts of a corpus that was made."""
    return [json.loads(line)["text"] for line in (folder / f"{corpus}.jsonl").read_text(encoding="utf-8").splitlines()]


def _texts(name: str, part: float) -> list[str]:
    count, fewest, most = _CORPORA[name]
    lines = [line.strip() for line in HELP.splitlines()]
    words = " ".join(line for line in lines if _is_prose(line)).split()
    draw = random.Random(name)
    found = []
    for _ in range(max(4, int(count * part))):
        size = draw.randint(fewest, most)
        start = draw.randrange(len(words) - size)
        found.append(" ".join(words[start : start + size]))
    return found


def _is_prose(line: str) -> bool:
    return len(line) > 30 and sum(letter.isalpha() or letter == " " for letter in line) > 0.85 * len(line)


def make_bundles(folder: Path, names: Sequence[str]) -> None:
    """Build the bundles that are missing, with the sample model's tokenizer."""
    from transformers import AutoTokenizer

    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model

    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return
    tokenizer = AutoTokenizer.from_pretrained(str(default_model()[0]), model_max_length=MAX_LEN)
    for name in missing:
        checkpoint = checkpoint_of(folder, name)
        _CHECKPOINTS[name](checkpoint, tokenizer)
        build(BuildOptions(model=checkpoint, output=folder / name, max_len=MAX_LEN, verify=None))


def _base(folder: Path, tokenizer: object, kind: str, **options: object) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),  # type: ignore[arg-type]
        hidden_size=_HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=12,
        intermediate_size=64,
        max_position_embeddings=MAX_LEN,
        **options,
    )
    base = folder.with_name(f"{folder.name}-base")
    getattr(transformers, kind)(config).eval().save_pretrained(base)
    tokenizer.save_pretrained(base)  # type: ignore[attr-defined]
    return base


def _similarity(folder: Path, tokenizer: object) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    base = Transformer(str(_base(folder, tokenizer, "BertModel")), max_seq_length=MAX_LEN)
    SentenceTransformer(modules=[base, Pooling(_HIDDEN)], device="cpu").save_pretrained(str(folder))


def _classes(folder: Path, tokenizer: object) -> None:
    _base(folder, tokenizer, "BertForSequenceClassification", num_labels=3).rename(folder)


def _sparse(folder: Path, tokenizer: object) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    base = str(_base(folder, tokenizer, "BertForMaskedLM"))
    transformer = Transformer(base, transformer_task="fill-mask", max_seq_length=MAX_LEN)
    SparseEncoder(modules=[transformer, SpladePooling()], device="cpu").save_pretrained(str(folder))


def _token_vectors(folder: Path, tokenizer: object) -> None:
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    of_tokens = {"module_input_name": "token_embeddings"}
    transformer = Transformer(str(_base(folder, tokenizer, "BertModel")), document_length=MAX_LEN)
    identity = torch.nn.Identity()
    projection = Dense(_HIDDEN, _TOKEN_DIMENSIONS, bias=False, activation_function=identity, **of_tokens)
    modules = [
        transformer,
        projection,
        MultiVectorMask(skiplist_words=list(string.punctuation)),
        Normalize(**of_tokens),
    ]
    model = MultiVectorEncoder(
        modules=modules, prompts={"query": "", "document": ""}, similarity_fn_name="maxsim", device="cpu"
    )
    model.save_pretrained(str(folder))


_CHECKPOINTS: Mapping[str, Callable[[Path, object], None]] = {
    "similarity": _similarity,
    "classes": _classes,
    "sparse": _sparse,
    "token-vectors": _token_vectors,
}
