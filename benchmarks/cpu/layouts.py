"""Embedders and rerankers without a family, in the layouts that they are published in, against sentence-transformers.

Usage: python -m benchmarks.cpu.layouts [LAYOUT ...] [--tokens 128 512] [--texts 8] [--threads 1] [--rounds 5]
    [--output FILE]

The models have 6 layers of hidden size 384 and random weights, on which speed does not depend. A case goes from texts,
of Python's own help, to vectors or scores: the bundle in ONNX Runtime or OpenVINO, or the checkpoint in
sentence-transformers, by PyTorch, whose answers the bundle's must be, in no more time. PyTorch's threads wait for each
other at every operator, so that other programs slow it down most: one thread is the default.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.targets import Figure, Target, run_cases
from benchmarks.texts import HELP, tokenizer_of
from hdexport.bench.measure.calls import timed, with_growth

_LONGEST = 512

_ATOL = 1e-4
"""The largest difference of vectors of length 1, and of scores as a part of the largest score."""

_BACKENDS = ("onnxruntime", "openvino")
_LIBRARY = "library"
_MODELS = (*_BACKENDS, _LIBRARY)

_TIMED_RUNS = 5

_SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "max_position_embeddings": _LONGEST,
}

_VOCABULARY, _END = 8000, "<|endoftext|>"

_CODE = Path(__file__).parents[2] / "tests/support/code_models/modeling_slopes.py"
"""Code of a checkpoint whose scores fall with distance (ALiBi)."""

_ROLE = '{{{{ messages | selectattr("role", "eq", "{}") | map(attribute="content") | first }}}}'
_TEMPLATE = (
    f"Judge the document: yes or no. Query: {_ROLE.format('query')} Document: {_ROLE.format('document')} Answer:"
)
_QUERY = "How are the methods of a class called?"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published model's layout.

    Attributes:
        model_type: of the checkpoint.
        config: values beside the sizes.
        pooling: of an embedder.
        scores: the tokens whose logits, the first less the second, are a reranker's score; None for an embedder.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    pooling: str = "lasttoken"
    scores: tuple[str, str] | None = None

    @property
    def is_code(self) -> bool:
        """Whether its model is Python code of the checkpoint's own."""
        return self.model_type == "slopes"


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}

LAYOUTS = {
    "gte-qwen2": Layout(model_type="qwen2", config={"is_causal": False}),
    "e5-mistral": Layout(model_type="mistral", config={"sliding_window": 4096}),
    "llama-embed": Layout(model_type="llama", config={"is_causal": False}, pooling="mean"),
    "qwen3-moe": Layout(model_type="qwen3_moe", config=_EXPERTS),
    "alibi": Layout(model_type="slopes", pooling="mean"),
    "ettin-decoder": Layout(model_type="modernbert-decoder", config={"local_attention": 128}),
    "qwen3-reranker": Layout(model_type="qwen3", config={"tie_word_embeddings": True}, scores=("yes", "no")),
    "mxbai-rerank-v2": Layout(model_type="qwen2", config={"tie_word_embeddings": True}, scores=("1", "0")),
}


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)} (default: all)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="of each text")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(refuse=parser.error)
    return run_cases("benchmarks.cpu.layouts", parser, _case_figures, _comparison)


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a model, and its error: the largest difference from the library's answers, of scores as a part of the
    largest."""
    name, model, tokens = options.case.split()
    folder, layout = options.models / name, LAYOUTS[name]
    run, expected = _run(folder, model, layout, options.threads), np.load(folder / f"{tokens}.npy")
    texts = json.loads((folder / f"{tokens}.json").read_text())
    found, growth_bytes = with_growth(lambda: run(texts))
    timed_runs = [timed(lambda: run(texts))[1:] for _ in range(_TIMED_RUNS)]
    size = 1.0 if expected.ndim > 1 else np.abs(expected).max()
    return {
        "latency_ms": statistics.median(latency_ms for latency_ms, _ in timed_runs),
        "cpu_ms": statistics.median(cpu_ms for _, cpu_ms in timed_runs),
        "growth_bytes": growth_bytes,
        "error": float(np.abs(found - expected).max() / size) if found.shape == expected.shape else float("inf"),
    }


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    names = options.layouts or list(LAYOUTS)
    if unknown := set(names) - set(LAYOUTS):
        options.refuse(f"{', '.join(sorted(unknown))}: there are {', '.join(LAYOUTS)}.")
    counts = {name: _make(options.models / name, LAYOUTS[name], options.tokens, options.texts) for name in names}
    cases = [f"{name} {model} {tokens}" for name in names for tokens in options.tokens for model in _MODELS]
    targets = []
    for name in names:
        for tokens in options.tokens:
            for backend in _BACKENDS:
                case = f"{name} {backend} {tokens}"
                targets.append(Target(case, None, Figure.ERROR, _ATOL))
                targets.append(Target(case, f"{name} {_LIBRARY} {tokens}", Figure.LATENCY, 1.0))
    return {"cases": cases, "targets": targets, "texts": options.texts, "threads": options.threads, "tokens": counts}


def _make(folder: Path, layout: Layout, lengths: Sequence[int], count: int) -> dict[str, int]:
    """Make a layout's checkpoint, its bundle, texts of each length, and the library's answers; the texts' tokens."""
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint.trust import Trust
    from hdruntime.bundle.manifest import Task

    folder.mkdir()
    _save(folder, layout)
    options = BuildOptions(
        model=folder / "checkpoint",
        output=folder / "bundle",
        max_len=_LONGEST,
        task=Task.SENTENCE_SIMILARITY if layout.scores is None else Task.TEXT_CLASSIFICATION,
        targets=("openvino",),
        # The tests prove what is measured here, and answers are compared.
        verify=None,
        unverified=True,
        trust=Trust(trust_remote_code=layout.is_code),
    )
    build(options)
    theirs, run, counts = _library(folder, layout), _run(folder, _LIBRARY, layout, 1), {}
    for tokens in lengths:
        texts = _texts(folder / "bundle/tokenizer.json", layout, theirs, tokens, count)
        (folder / f"{tokens}.json").write_text(json.dumps(texts))
        np.save(folder / f"{tokens}.npy", run(texts))
        counts[str(tokens)] = int(theirs.preprocess(texts)["attention_mask"].sum())
    return counts


def _run(folder: Path, model: str, layout: Layout, threads: int) -> Callable[[Sequence[Any]], np.ndarray]:
    """From texts to vectors, or from pairs to scores as the model gives them, by a backend or the library."""
    import hdruntime

    if model == _LIBRARY:
        import torch

        torch.set_num_threads(threads)
        encoder, identity = _library(folder, layout), torch.nn.Identity()
    else:
        kind: Any = hdruntime.SentenceEncoder if layout.scores is None else hdruntime.CrossEncoder
        encoder, identity = kind(folder / "bundle", backend=model, threads=threads), "identity"
    if layout.scores is None:
        return lambda texts: np.asarray(encoder.encode(texts))
    return lambda pairs: np.asarray(encoder.predict(pairs, activation_fn=identity))


def _library(folder: Path, layout: Layout) -> Any:
    import sentence_transformers

    path = str(folder / "checkpoint")
    if layout.scores is None:
        return sentence_transformers.SentenceTransformer(path, device="cpu", trust_remote_code=layout.is_code)
    return sentence_transformers.CrossEncoder(path, device="cpu", max_length=_LONGEST)


def _texts(tokenizer: Path, layout: Layout, theirs: Any, tokens: int, count: int) -> list[Any]:
    """Texts, or pairs of the query and a text, of so many tokens each, what is written around them included."""
    around = int(theirs.preprocess(["" if layout.scores is None else (_QUERY, "")])["attention_mask"].sum())
    whole = tokenizer_of(tokenizer).encode(HELP, add_special_tokens=False).offsets
    size = tokens - around
    documents = [HELP[whole[first][0] : whole[first + size - 1][1]] for first in range(0, count * size, size)]
    return documents if layout.scores is None else [(_QUERY, document) for document in documents]


def _save(folder: Path, layout: Layout) -> None:
    """Save a random model as sentence-transformers does, in the folder's ``checkpoint``."""
    import torch
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformers.utils.logging.disable_progress_bar()
    base, tokenizer = folder / "base", _tokenizer(layout)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = {"model_type": layout.model_type, **_SIZES, **ids, "tie_word_embeddings": False, **layout.config}
    if layout.is_code:
        shutil.copy(_CODE, base)
        config["auto_map"] = {"AutoConfig": f"{_CODE.stem}.SlopesConfig", "AutoModel": f"{_CODE.stem}.SlopesModel"}
    (base / "config.json").write_text(json.dumps(config))
    kind = transformers.AutoModel if layout.scores is None else transformers.AutoModelForCausalLM
    made = transformers.AutoConfig.from_pretrained(base, trust_remote_code=layout.is_code)
    kind.from_config(made, trust_remote_code=layout.is_code).save_pretrained(base)
    if layout.scores is None:
        code = {"trust_remote_code": layout.is_code}
        transformer = Transformer(
            str(base), max_seq_length=_LONGEST, model_kwargs=code, config_kwargs=code, processor_kwargs=code
        )
        modules = [transformer, Pooling(_SIZES["hidden_size"], layout.pooling), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder / "checkpoint"))
        return
    reranker = CrossEncoder(str(base), device="cpu", max_length=_LONGEST)
    true, false = tokenizer.convert_tokens_to_ids(layout.scores)
    reranker[1] = LogitScore(true_token_id=true, false_token_id=false)
    reranker.save_pretrained(str(folder / "checkpoint"))


def _tokenizer(layout: Layout) -> Any:
    """A tokenizer of bytes and words, as decoders have, of the texts; it pads on the left, and ends a text."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    # The answers of rerankers are tokens.
    made.train_from_iterator([HELP, "yes no 0 1\nyes\nno\n0\n1" * 999], trainer)
    made.post_processor = processors.TemplateProcessing(single=f"$A {_END}", special_tokens=[(_END, 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=_END,
        pad_token=_END,
        padding_side="left",
        model_max_length=_LONGEST,
        **({} if layout.scores is None else {"chat_template": _TEMPLATE}),
    )


if __name__ == "__main__":
    sys.exit(main())
