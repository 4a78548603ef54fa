"""A large embedder on a CPU: what its build takes, and what a session takes at several lengths.

Usage: python -m benchmarks.cpu.large [--shape 0.6B] [--layers N] [--only build session] [--lengths 128 512]
           [--folder FOLDER] [--output FILE]

The model has random bfloat16 weights in the shape of Qwen3-Embedding-0.6B or -4B; --layers takes fewer layers. Each
case is a process of its own, measured as a whole: imports, loading, the work.

* build: ``hdexport build --max-len 4096 --target openvino --int8``, with the comparison with PyTorch; build-no-verify
  without it.
* session: the bundle by `hdruntime.load` on a backend in a precision, one text of each length: the first run, then the
  median of three.
* sentence-transformers: the checkpoint in bfloat16, listed beside.

The folder keeps the checkpoint and the bundle for a second run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cpu.build_time import process_figures
from benchmarks.record import show

SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
_VOCAB_SIZE = 151_669
_THREADS = 2

CASES = ("build-no-verify", "build", "session", "sentence-transformers")
SESSIONS = (("openvino", "bfloat16"), ("openvino", "int8"), ("openvino", "float32"), ("onnxruntime", "float32"))

_BUILD = "import sys; from hdexport.cli import main; sys.exit(main())"

_RUN = """
import json, statistics, sys, time
import numpy as np

model, backend, precision, threads, lengths, output = sys.argv[1:]
began = time.perf_counter()
if backend == "sentence-transformers":
    import torch
    import sentence_transformers
    torch.set_num_threads(int(threads))
    encoder = sentence_transformers.SentenceTransformer(model, model_kwargs={"dtype": torch.bfloat16}, device="cpu")
    loaded = encoder[0].model
    def run(ids):
        with torch.inference_mode():
            loaded(input_ids=torch.from_numpy(ids), attention_mask=torch.ones_like(torch.from_numpy(ids)))
else:
    import hdruntime
    session = hdruntime.load(model, backend, precision=precision, threads=int(threads))
    def run(ids):
        session(input_ids=ids, attention_mask=np.ones_like(ids))
found = {"load_s": time.perf_counter() - began, "run_s": {}}
for tokens in json.loads(lengths):
    ids = np.random.default_rng(tokens).integers(10, 150_000, (1, tokens))
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        run(ids)
        seconds.append(time.perf_counter() - began)
    found["run_s"][tokens] = {"first": seconds[0], "median": statistics.median(seconds[1:])}
with open(output, "w") as file:
    json.dump(found, file)
"""


def save_checkpoint(directory: Path, shape: str, layers: int | None = None) -> None:
    """Save a random model in bfloat16 with a tokenizer of numbered words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        head_dim=128,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **sizes,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        Qwen3Model(config).save_pretrained(directory)
    finally:
        torch.set_default_dtype(torch.float32)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(_VOCAB_SIZE)}, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w3", eos_token="w1").save_pretrained(
        directory
    )


def measured(case: str, checkpoint: Path, bundle: Path, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """The figures of a case, each session's by itself."""
    if case.startswith("build"):
        command = [sys.executable, "-c", _BUILD, "build", str(checkpoint), "--max-len", "4096", "--target", "openvino"]
        command += ["--int8", "--force", "-o", str(bundle)]
        command += ["--no-verify"] if case == "build-no-verify" else []
        yield process_figures(command)
        return
    own = [(str(bundle), *session) for session in SESSIONS]
    runs = own if case == "session" else [(str(checkpoint), case, "bfloat16")]
    for model, backend, precision in runs:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "found.json"
            arguments = [model, backend, precision, str(_THREADS), json.dumps(lengths), str(output)]
            figures = process_figures([sys.executable, "-c", _RUN, *arguments])
            yield {"backend": backend, "precision": precision, **figures, **json.loads(output.read_text())}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        checkpoint, bundle = folder / "checkpoint", folder / "bundle"
        if not checkpoint.is_dir():
            # In a process of its own, so that its memory is no part of the others' peaks.
            process_figures([
                sys.executable, "-c", "import sys, pathlib; from benchmarks.cpu.large import save_checkpoint; "
                "save_checkpoint(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) or None)",
                str(checkpoint), options.shape, str(options.layers or 0),
            ])  # fmt: skip
        if not bundle.is_dir() and not any(case.startswith("build") for case in options.only):
            parser.error(f"{bundle} is no bundle: build it first, with --only build session")
        size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        for case in options.only:
            for figures in measured(case, checkpoint, bundle, options.lengths):
                show(
                    options.output, module="benchmarks.cpu.large", case=case, shape=options.shape,
                    layers=options.layers, checkpoint_bytes=size, **figures,
                )  # fmt: skip


if __name__ == "__main__":
    main()
