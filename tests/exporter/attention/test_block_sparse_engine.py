"""Engines of block-sparse models: real ones of TensorRT-RTX, with several profiles, by our plugin and by its layers.

A build proves one shape of each profile, its opt; that the graph is right at all others is shown in ONNX Runtime, by
the tests of the families and of conversions.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hdexport.attention.kinds import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.engines.build import EngineOptions
from hdexport.engines.profiles import profiles_from_options
from hdexport.graph.lowering.tensorrt import AttentionImpl
from hdexport.model.tasks import Task
from hdruntime.bundle.manifest import Backend
from support.attention_records import recorded
from support.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None or importlib.util.find_spec("polygraphy") is None,
    reason="TensorRT-RTX (which builds engines without a GPU) or Polygraphy is not installed",
)

MAX_LEN = 1000
PROFILES = profiles_from_options(MAX_LEN, profiles="400,1000", batch="1:3:8")
"""Neither opt length, nor the batch of 3, is what is traced (2 texts of 37 tokens), and neither is a multiple of 64."""

SIZES = {"hidden_size": 128, "initializer_range": 0.1}
"""Heads of 32, the smallest that there are kernels for."""


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory):
    """Build a bundle with an engine: its directory and manifest."""
    directory = tmp_path_factory.mktemp("engines")

    def make(
        model_type: str,
        impl: AttentionImpl,
        spec: str | None = None,
        *,
        layers: int = 1,
        precision: str = "float16",
        **sizes: int,
    ):
        checkpoint = directory / f"{model_type}-{layers}"
        if not checkpoint.exists():
            save_tiny_model(
                checkpoint, model_type, Task.FEATURE_EXTRACTION, num_hidden_layers=layers, **(SIZES | sizes)
            )
        output = directory / f"{model_type}-{impl.value}-{(spec or 'own').partition(':')[0]}-{precision}"
        options = BuildOptions(
            model=checkpoint,
            output=output,
            max_len=MAX_LEN,
            precision=precision,
            attention=attention_from_spec(spec),
            engines=EngineOptions(
                flavours=(Backend.TENSORRT_RTX,),
                attention_impl=impl,
                profiles=PROFILES,
                # That there are kernels for every GPU of an engine is tested with the kernels.
                architectures=("sm86",),
            ),
            verify=None,
        )
        return output, build(options)

    return make


def check_engine(output: Path, manifest, *, plugins: int) -> None:
    (engine,) = manifest.engines
    assert engine.profiles == PROFILES
    assert (output / engine.file).stat().st_size > 10_000
    passport = json.loads((output / engine.passport).read_text())
    assert passport["plugins"] == ({"BlockSparseAttention": plugins} if plugins else {})
    kernels = {Path(name).name for name in manifest.files if name.startswith("kernels/")}
    assert bool(kernels) == (plugins > 0)
    assert all(name.startswith("BlockSparseAttention-") for name in kernels)


BLOCKS = {"block_size": 64, "num_random_blocks": 1}
"""Dense up to 448 tokens: the shorter profile is on one side, the longer reaches over both."""


@pytest.mark.parametrize(("impl", "layers", "plugins"), [(AttentionImpl.PLUGIN, 2, 2), (AttentionImpl.NATIVE, 1, 0)])
def test_a_big_bird_has_an_engine(engine_of, impl: AttentionImpl, layers: int, plugins: int) -> None:
    output, manifest = engine_of("big_bird", impl, layers=layers, **BLOCKS)
    check_engine(output, manifest, plugins=plugins)


def test_tables_of_random_blocks_go_into_the_engine(engine_of) -> None:
    output, manifest = engine_of("big_bird", AttentionImpl.PLUGIN, "bigbird:mode=table", precision="float32", **BLOCKS)
    assert recorded(manifest, "blocks").mode == "table"
    check_engine(output, manifest, plugins=1)


def test_an_etc_has_an_engine_with_blocks_of_the_papers_size(engine_of) -> None:
    output, manifest = engine_of("bert", AttentionImpl.PLUGIN, "etc:global=6,block=84,tokens=3")
    check_engine(output, manifest, plugins=1)
