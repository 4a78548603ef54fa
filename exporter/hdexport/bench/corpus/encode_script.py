"""A script that embeds a corpus by another library, in whichever environment has that library.

``python encode_script.py REQUEST`` reads a JSON file with the model's folder, the texts' JSON file, ``backend``
(``torch`` or ``openvino`` of sentence-transformers, ``fastembed``), ``dtype``, ``threads``, ``max_length``,
``batch_sizes`` and ``output``, a ``.npy`` file for the vectors. The script prints a line of JSON: the seconds of each
batch size, and of the last one the seconds and the tokens without and with padding.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WARM_UP_TEXTS = 8


def main(file: str) -> None:
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
    import numpy as np

    count = {"real": 0, "computed": 0}
    encode = (_fastembed if request["backend"] == "fastembed" else _sentence_transformers)(request, count)
    encode(texts[:: max(1, len(texts) // _WARM_UP_TEXTS)], batch_size=1)
    seconds = {}
    for size in request["batch_sizes"]:
        count.update(real=0, computed=0)
        began = time.perf_counter()
        vectors = encode(texts, batch_size=size)
        seconds[size] = time.perf_counter() - began
    np.save(request["output"], np.asarray(vectors, np.float32))
    last = {"seconds": seconds[size], "tokens": count["real"], "computed_tokens": count["computed"]}
    print(json.dumps({**last, "seconds_by_size": seconds}))


def _sentence_transformers(request: dict[str, Any], count: dict[str, int]) -> Callable[..., Any]:
    """An `encode` that counts the tokens of its batches."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(request["threads"])
    options: dict[str, Any] = {"device": "cpu", "local_files_only": True}
    if request["backend"] == "openvino":
        hint = {"float32": "f32", "bfloat16": "bf16"}[request["dtype"]]
        config = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": request["threads"]}
        options |= {"backend": "openvino", "model_kwargs": {"ov_config": config}}
    model: Any = SentenceTransformer(request["model"], **options)
    if request["backend"] == "torch":
        model = model.to(getattr(torch, request["dtype"]))
    model.max_seq_length = request["max_length"]
    if request["scaled_for"] is not None:
        # Only in hdexport's own environment.
        from hdexport.bench.peers.torch_model import scale_queries
        from hdexport.families import family_of
        from hdruntime.bundle.reader import open_bundle

        manifest = open_bundle(Path(request["scaled_for"]), check_files=False).manifest
        scale_queries(model[0].auto_model, family_of(manifest.model_type), manifest)
    forward = model.forward

    def counting(features: Any, *args: Any, **kwargs: Any) -> Any:
        _add(features["attention_mask"].numpy(), count)
        return forward(features, *args, **kwargs)

    model.forward = counting
    return functools.partial(model.encode, show_progress_bar=False)


def _fastembed(request: dict[str, Any], count: dict[str, int]) -> Callable[..., Any]:
    """An `encode` that counts the tokens of its batches."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    name = "hdexport/model"
    TextEmbedding.add_custom_model(
        name,
        pooling=PoolingType.DISABLED,  # the graph pools
        normalization=False,
        sources=ModelSource(hf=name),  # not asked: the folder is here
        dim=0,  # of a listing alone
        model_file="model.onnx",
        output_name="sentence_embedding",
    )
    model = TextEmbedding(
        name, specific_model_path=request["model"], threads=request["threads"], providers=["CPUExecutionProvider"]
    )
    embed = model.model.onnx_embed

    def counting(documents: list[str], **kwargs: Any) -> Any:
        context = embed(documents, **kwargs)
        _add(context.attention_mask, count)
        return context

    model.model.onnx_embed = counting
    return lambda texts, batch_size: list(model.embed(texts, batch_size=batch_size))


def _add(mask: Any, count: dict[str, int]) -> None:
    count["real"] += int(mask.sum())
    count["computed"] += mask.size


if __name__ == "__main__":
    main(sys.argv[1])
