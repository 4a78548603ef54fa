"""A script that embeds a corpus by llama.cpp; it runs in the environment that has llama-cpp-python and gguf.

``python llama_script.py REQUEST``, a JSON file with the BERT checkpoint's ``model``, ``weights`` (``F32`` or ``Q8_0``),
``threads``, ``max_len``, the texts' JSON file and ``output``. It prints a line of JSON, the seconds. The vectors are in
``output``, a ``.npy`` file.

The texts go one by one: a batch of llama.cpp attends to all its texts at once, which takes 1.5 to 2.5 times as long.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_WARM_UP_TEXTS = 8

_LAYERS = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
"""GGUF's names of a layer's tensors -> transformers'."""

_EMBEDDINGS = {
    "token_embd": "word_embeddings",
    "position_embd": "position_embeddings",
    "token_types": "token_type_embeddings",
    "token_embd_norm": "LayerNorm",
}


def main(file: str) -> None:
    """Convert the checkpoint, embed, and print the figures."""
    import llama_cpp

    request = json.loads(Path(file).read_text(encoding="utf-8"))
    texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        _convert(Path(request["model"]), path, request["weights"])
        model = llama_cpp.Llama(
            str(path),
            embedding=True,
            pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN,
            **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), request["max_len"]),
            **dict.fromkeys(("n_threads", "n_threads_batch"), request["threads"]),
            verbose=False,
        )
    for text in texts[:: max(1, len(texts) // _WARM_UP_TEXTS)]:
        model.embed(text)
    began = time.perf_counter()
    vectors = [model.embed(text, normalize=True, truncate=True) for text in texts]
    seconds = time.perf_counter() - began
    np.save(request["output"], np.asarray(vectors, np.float32))
    print(json.dumps({"seconds": seconds}))


def _convert(model: Path, output: Path, weights: str) -> None:
    """Write a BERT that pools by the mean as GGUF, with its WordPiece vocabulary."""
    import gguf
    from safetensors.numpy import load_file

    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(output, "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    _add_vocabulary(writer, json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    writer.add_token_type_count(config["type_vocab_size"])
    names = {name: f"embeddings.{theirs}" for name, theirs in _EMBEDDINGS.items()}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{name}": f"encoder.layer.{layer}.{theirs}" for name, theirs in _LAYERS.items()}
    for name, theirs in names.items():
        for part in ("weight", "bias"):
            if f"{theirs}.{part}" in tensors:
                _add_tensor(writer, f"{name}.{part}", tensors[f"{theirs}.{part}"], weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, ids: dict[str, int]) -> None:
    import gguf

    tokens = sorted(ids, key=ids.__getitem__)
    special = {"[CLS]": writer.add_bos_token_id, "[SEP]": writer.add_sep_token_id, "[PAD]": writer.add_pad_token_id}
    special |= {"[UNK]": writer.add_unk_token_id, "[MASK]": writer.add_mask_token_id}
    for token, add in special.items():
        add(ids[token])
    writer.add_eos_token_id(ids["[SEP]"])
    writer.add_tokenizer_model("bert")
    writer.add_token_list([_spelt(token) for token in tokens])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[token in special] for token in tokens])


def _spelt(token: str) -> str:
    """A word begins with U+2581 in GGUF, its other parts with nothing; in WordPiece these begin with ##."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def _add_tensor(writer: Any, name: str, tensor: npt.NDArray[np.float32], weights: str) -> None:
    import gguf

    # As llama.cpp's own converter does: what is added, and not multiplied with, keeps its precision.
    if weights == "F32" or tensor.ndim == 1 or name.startswith(("position_embd", "token_types")):
        writer.add_tensor(name, tensor)
        return
    kind = gguf.GGMLQuantizationType[weights]
    writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)


if __name__ == "__main__":
    main(sys.argv[1])
