"""An ALBERT of 12 layers stays small: one layer's weights, in the graph and in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.engines.build import EngineOptions
from hdexport.graph.targets.registry import chosen_targets, variants_of
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options
from hdruntime.bundle.manifest import Manifest

MAX_LEN = 1024
EMBEDDING_SIZE = 64
TEXT_BYTES = 1e6
"""What a graph of 12 layers may take besides weights."""
ENGINE_BYTES = 12e6
"""What an engine may hold besides weights; the other 11 layers would take 39 MB in float16."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """albert-base at half its width, with random weights: 12 layers, 7.6 MB in float32."""
    path = tmp_path_factory.mktemp("albert") / "albert-base"
    config = transformers.AlbertConfig(
        vocab_size=2000,
        embedding_size=EMBEDDING_SIZE,
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    transformers.AlbertModel(config, add_pooling_layer=False).save_pretrained(path)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "itemsize"), [("float32", 4), ("float16", 2)])
def test_weights_and_engine_hold_one_layer(checkpoint, tmp_path, precision: str, itemsize: int) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")
    family = find_checkpoint(checkpoint).family
    manifest: Manifest = build(
        BuildOptions(
            model=checkpoint,
            output=tmp_path / "bundle",
            max_len=MAX_LEN,
            precision=precision,
            engines=EngineOptions(
                variants=variants_of(chosen_targets(["tensorrt-rtx"])),
                profiles=profiles_from_options(MAX_LEN, one_profile=family.shares_layers),
            ),
            verify=None,
        )
    )
    size_bytes = {name: record.size_bytes for name, record in manifest.files.items()}
    checkpoint_bytes = (checkpoint / "model.safetensors").stat().st_size * itemsize // 4
    table_bytes = MAX_LEN * EMBEDDING_SIZE * itemsize
    graph_bytes = size_bytes["model.onnx"] + size_bytes["model.onnx.data"]
    assert graph_bytes <= checkpoint_bytes + table_bytes + TEXT_BYTES
    (engine,) = manifest.engines
    assert size_bytes[engine.file] <= graph_bytes + ENGINE_BYTES
