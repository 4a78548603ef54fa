"""A script that embeds a corpus by another library, in whichever environment has that library.

``python encode_script.py REQUEST`` reads a JSON file with the model's folder, the texts' JSON file, ``backend``
(``torch`` or ``openvino`` of sentence-transformers, ``fastembed``), ``device``, ``dtype``, ``compiled``, ``threads``,
``max_length``, ``batch_sizes``, ``warm_up_texts``, ``least_seconds`` that each size is timed, and ``output``, a
``.npy`` file for the vectors. The script prints a line of JSON: the seconds of a call with each batch size that fits
the GPU's memory, and of the last one the seconds, when timing ``began`` and ``ended`` on the machine's clock, and the
tokens without and with padding; or ``status`` and ``reason`` where torch.compile takes too long.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST_COMPILE_SECONDS = 60.0
"""A user waits no longer for torch.compile."""


def main(file: str) -> None:
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
    import numpy as np

    count: dict[str, Any] = {"real": 0, "computed": 0}
    encode = (_fastembed if request["backend"] == "fastembed" else _sentence_transformers)(request, count)
    on_gpu, sizes = request["device"] == "cuda", request["batch_sizes"]
    some = texts[:: max(1, len(texts) // request["warm_up_texts"])]
    if not on_gpu:
        encode(some, batch_size=1)
    seconds: dict[int, float] = {}
    for size in sizes:
        try:
            if on_gpu:
                # Kernels and the memory of a GPU are chosen for a batch's shape.
                _warm_up(functools.partial(encode, some, batch_size=size), is_compiled=request["compiled"])
            calls, began, ended = 0, time.monotonic(), 0.0
            while not calls or ended - began < request["least_seconds"]:
                count.update(real=0, computed=0)
                vectors = encode(texts, batch_size=size)
                calls, ended = calls + 1, time.monotonic()
        except Exception as error:
            # The best of several batch sizes is wanted; a batch size that runs out of memory is not the best.
            if len(sizes) == 1 or type(error).__name__ != "OutOfMemoryError":
                raise
            continue
        seconds[size] = (ended - began) / calls
        last = {"seconds": seconds[size], "began": began, "ended": ended}
        last |= {"tokens": int(count["real"]), "computed_tokens": count["computed"]}
    if not seconds:
        raise MemoryError("No batch size fits the GPU's memory.")
    np.save(request["output"], np.asarray(vectors, np.float32))
    print(json.dumps({**last, "seconds_by_size": seconds}))


def _warm_up(call: Callable[[], object], *, is_compiled: bool) -> None:
    timer = threading.Timer(_MOST_COMPILE_SECONDS, _end_compiling)
    timer.daemon = True
    if is_compiled:
        timer.start()
    call()
    timer.cancel()


def _end_compiling() -> None:
    reason = f"torch.compile took more than {_MOST_COMPILE_SECONDS:.0f} s"
    print(json.dumps({"status": "timeout", "reason": reason}), flush=True)
    # Nothing stops a compiler in another thread.
    os._exit(0)


def _sentence_transformers(request: dict[str, Any], count: dict[str, Any]) -> Callable[..., Any]:
    """An `encode` that counts the tokens of its batches."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(request["threads"])
    options: dict[str, Any] = {"device": request["device"], "local_files_only": True}
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
        from hdexport.bench.baselines.torch_model import scale_queries
        from hdexport.families import family_of
        from hdruntime.bundle.reader import open_bundle

        manifest = open_bundle(Path(request["scaled_for"]), check_files=False).manifest
        scale_queries(model[0].auto_model, family_of(manifest.model_type), manifest)
    if request["compiled"]:
        # A layer compiles once for all that are like it; the whole model takes minutes.
        lists = [module for module in model[0].auto_model.modules() if isinstance(module, torch.nn.ModuleList)]
        for layer in max(lists, key=len, default=[model[0].auto_model]):
            layer.compile(dynamic=True)
    forward = model.forward

    def counting(features: Any, *args: Any, **kwargs: Any) -> Any:
        _add(features["attention_mask"], count)
        return forward(features, *args, **kwargs)

    model.forward = counting
    return functools.partial(model.encode, show_progress_bar=False)


def _fastembed(request: dict[str, Any], count: dict[str, Any]) -> Callable[..., Any]:
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


def _add(mask: Any, count: dict[str, Any]) -> None:
    # The sum of a tensor stays on the GPU, so that nothing waits for it.
    count["real"] += mask.sum()
    count["computed"] += math.prod(mask.shape)


if __name__ == "__main__":
    main(sys.argv[1])
