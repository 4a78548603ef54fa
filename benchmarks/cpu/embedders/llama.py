"""A Qwen3 in llama.cpp; the variant is GGUF's type of weights, ``Q8_0``.

The environment has llama-cpp-python, which is compiled for the processor when it is installed, and gguf.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

PACKAGES = ("llama-cpp-python", "gguf")

_FILE = "model.gguf"


def convert(checkpoint: Path, model: Path, weights: str) -> None:
    """Write a Qwen3 that pools its last token as GGUF, without a vocabulary: texts are ids."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(model / _FILE, "qwen3", use_temp_file=False)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_pooling_type(gguf.PoolingType.LAST)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in SafetensorsLocal(file).tensors.items():
            theirs = names.get_name(f"model.{name}", try_suffixes=(".weight",))
            _add_tensor(writer, str(theirs), tensor, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: LocalTensor, weights: str) -> None:
    stored = gguf.GGMLQuantizationType[tensor.dtype]
    array = gguf.quants.dequantize(tensor.mmap_bytes(), stored).reshape(tensor.shape)
    # As llama.cpp's own converter does: norms keep their precision.
    if array.ndim == 1:
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType[weights]
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


class _Ids(BaseLlamaTokenizer):
    """Texts that are ids with blanks between them."""

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int], *unused: Any, **ignored: Any) -> bytes:
        return " ".join(map(str, tokens)).encode()


def load(model: Path, *, variant: str, threads: int, max_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from ids, [1, tokens], to the embedding, [hidden]."""
    loaded = llama_cpp.Llama(
        str(model / _FILE),
        embedding=True,
        tokenizer=_Ids(),
        **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), max_tokens),
        **dict.fromkeys(("n_threads", "n_threads_batch"), threads),
        verbose=False,
    )

    def run(ids: np.ndarray) -> np.ndarray:
        return np.asarray(loaded.embed(" ".join(map(str, ids[0])), normalize=True), np.float32)

    return run
