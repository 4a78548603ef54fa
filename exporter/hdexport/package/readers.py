"""Other systems' rules for reading a package's files, by which the check runs a package."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Encoding, Tokenizer

from hdexport.package.target import Package
from hdruntime.arrays import FloatArray

DJL_LONGEST = 512
"""Tokens of DJL's ``modelMaxLength`` where nothing sets it: HuggingFaceTokenizer.java, DJL 0.37."""


@functools.lru_cache(maxsize=1)
def onnx_session(path: Path, modified: int) -> Any:
    """The graph in ONNX Runtime, loaded from bytes where the file has its weights inside."""
    beside = [file for file in path.parent.iterdir() if file.name.startswith(path.name) and file != path]
    return onnxruntime.InferenceSession(str(path) if beside else path.read_bytes(), providers=["CPUExecutionProvider"])


def run_onnx(path: Path, encoding: Encoding) -> Mapping[str, FloatArray]:
    """Every output of a graph for one text, output name -> array with a batch of 1."""
    session = onnx_session(path, path.stat().st_mtime_ns)
    values = {
        "input_ids": encoding.ids,
        "attention_mask": encoding.attention_mask,
        "token_type_ids": encoding.type_ids,
    }
    feeds = {each.name: np.array([values[each.name]], np.int64) for each in session.get_inputs()}
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, modified: int) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def tokenizer_file(path: Path) -> Tokenizer:
    """``tokenizer.json`` as the tokenizers library reads it, with the file's own truncation and padding."""
    return _tokenizer(path, path.stat().st_mtime_ns)


def djl_tokenizer(path: Path, *, model_max_length: int | None = None) -> Tokenizer:
    """``tokenizer.json`` as DJL reads it: the file's truncation, at most ``modelMaxLength``; no fixed padding.

    Source: HuggingFaceTokenizer.java, `updateTruncationAndPadding`, DJL 0.37.
    """
    tokenizer = Tokenizer.from_file(str(path))
    longest = (tokenizer.truncation or {}).get("max_length") or DJL_LONGEST
    tokenizer.enable_truncation(min(longest, model_max_length or DJL_LONGEST))
    if tokenizer.padding is not None:
        tokenizer.enable_padding(**{**tokenizer.padding, "length": None})
    return tokenizer


def model_max_length(directory: Path) -> int:
    """``model_max_length`` of ``tokenizer_config.json``, by which transformers and transformers.js truncate."""
    value = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"]
    assert isinstance(value, int)
    return value


def mean(states: FloatArray, encoding: Encoding) -> FloatArray:
    """The masked mean of ``[1, tokens, hidden]``, as ``[hidden]``."""
    mask = np.array(encoding.attention_mask, np.float32)[:, None]
    return (states[0] * mask).sum(0) / np.clip(mask.sum(), 1e-9, None)


def djl_mean(package: Package, text: str, *, model_max_length: int | None = None) -> Mapping[str, FloatArray]:
    """A masked mean of ``last_hidden_state`` of DJL's tokens, as Java's readers pool and never normalize; the default
    of ``modelMaxLength`` is the package's number."""
    longest = model_max_length or package.max_seq_length
    encoding = djl_tokenizer(package.directory / "tokenizer.json", model_max_length=longest).encode(text)
    states = run_onnx(package.directory / "model.onnx", encoding)["last_hidden_state"]
    return {"sentence_embedding": mean(states, encoding)}


def onnx_package(package: Package, text: str, pair: str | None = None) -> Mapping[str, FloatArray]:
    """A graph and its tokenizer as ONNX Runtime and the tokenizers library run them, for a text or a pair."""
    encoding = tokenizer_file(package.directory / "tokenizer.json").encode(text, pair)
    return run_onnx(package.directory / "model.onnx", encoding)


def transformers_tokenizer(directory: Path) -> Tokenizer:
    """``tokenizer.json`` as transformers.js, fastembed and light-embed read it.

    They truncate to ``model_max_length`` of ``tokenizer_config.json``, whatever the file's own truncation is.
    """
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    direction = (tokenizer.truncation or {}).get("direction", "right")
    tokenizer.enable_truncation(model_max_length(directory), direction=direction.lower())
    return tokenizer
