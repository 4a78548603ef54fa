"""A script that embeds a corpus by sentence-transformers; it runs in whichever environment has that library.

``python encode_script.py REQUEST``, a JSON file with the model's folder, the texts' JSON file, ``backend`` (``torch``
or ``openvino``), ``dtype``, ``threads``, ``max_length``, ``batch_sizes`` and ``output``. It prints a line of JSON: the
seconds of each batch size, and of the last one the tokens without and with padding. The vectors are in ``output``, a
``.npy`` file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_WARM_UP_TEXTS = 8


def main(file: str) -> None:
    """Embed, and print the figures."""
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
    import numpy as np

    model = _model(request)
    count = _counted(model)
    model.encode(texts[:: max(1, len(texts) // _WARM_UP_TEXTS)], batch_size=1, show_progress_bar=False)
    seconds = {}
    for size in request["batch_sizes"]:
        count.update(real=0, computed=0)
        began = time.perf_counter()
        vectors = model.encode(texts, batch_size=size, show_progress_bar=False)
        seconds[size] = time.perf_counter() - began
    np.save(request["output"], np.asarray(vectors, np.float32))
    print(json.dumps({"seconds": seconds, "tokens": count["real"], "computed_tokens": count["computed"]}))


def _model(request: dict[str, Any]) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(request["threads"])
    options: dict[str, Any] = {"device": "cpu", "local_files_only": True}
    if request["backend"] == "openvino":
        hint = {"float32": "f32", "bfloat16": "bf16"}[request["dtype"]]
        config = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": request["threads"]}
        options |= {"backend": "openvino", "model_kwargs": {"ov_config": config}}
    model = SentenceTransformer(request["model"], **options)
    if request["backend"] == "torch":
        model = model.to(getattr(torch, request["dtype"]))
    model.max_seq_length = request["max_length"]
    if request["scaled_for"] is not None:
        # In hdexport's own environment alone.
        from hdexport.bench.peers.torch_model import scale_queries
        from hdexport.families import family_of
        from hdruntime.bundle.reader import open_bundle

        manifest = open_bundle(Path(request["scaled_for"]), check_files=False).manifest
        scale_queries(model[0].auto_model, family_of(manifest.model_type), manifest)
    return model


def _counted(model: Any) -> dict[str, int]:
    """Counts the tokens of the model's batches from now on."""
    count = {"real": 0, "computed": 0}
    forward = model.forward

    def counting(features: Any, *args: Any, **kwargs: Any) -> Any:
        mask = features["attention_mask"]
        count["real"] += int(mask.sum())
        count["computed"] += mask.numel()
        return forward(features, *args, **kwargs)

    model.forward = counting
    return count


if __name__ == "__main__":
    main(sys.argv[1])
