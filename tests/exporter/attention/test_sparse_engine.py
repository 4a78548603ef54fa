"""Engines of attention by operators: real ones of TensorRT-RTX, with several profiles, by our plugins and its layers.

A build proves one shape of each profile, its opt; that the graph is right at all others is shown in ONNX Runtime, by
the tests of the families and of conversions.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdexport.engines.build import EngineOptions
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options, with_memory
from hdexport.rebuild import RebuildOptions, rebuild
from hdruntime.bundle.manifest import Backend
from support.attention_records import recorded
from support.grids import nightly_unless
from support.needs import needs_rtx

pytestmark = needs_rtx

MAX_LEN = 1000
PROFILES = profiles_from_options(MAX_LEN, profiles="400,1000", batch="1:3:8")
"""Neither opt length, nor the batch of 3, is what is traced (2 texts of 37 tokens), and neither is a multiple of 64."""

SIZES = {"hidden_size": 128, "initializer_range": 0.1}
"""Heads of 32, the smallest that there are kernels for."""


REFORMER = {"attention_head_size": 32}

MEMORY = 301
REMEMBERING = {"mem_len": MEMORY}
XLNET, TRANSFO_XL = {"d_model": 128, **REMEMBERING}, {"d_head": 32, **REMEMBERING}
"""Their profiles are for memories of up to 301 tokens, where 23 are traced."""

T5 = {"d_model": 128, "d_kv": 32, "num_layers": 1}

TWO = {"num_hidden_layers": 2}
GEMMA, WIDER = TWO | {"head_dim": 256}, TWO | {"head_dim": 256, "global_head_dim": 512}

BLOCKS = {"block_size": 64, "num_random_blocks": 1}
"""Dense up to 448 tokens: the shorter profile is on one side, the longer reaches over both."""


TWO_BLOCKS = {**BLOCKS, **TWO}

ARCHITECTURE_OF_TYPE = {"reformer": "sm120"}
"""Others than sm86, as test_shipped_kernels.py has the same kernels."""


@pytest.mark.parametrize(
    ("model_type", "spec", "precision", "changes", "plugins"),
    [
        ("big_bird", "bigbird:mode=table", "float16", TWO_BLOCKS, {"BlockSparseAttention": 2}),
        nightly_unless(False, "big_bird", None, "float16", TWO_BLOCKS, {"BlockSparseAttention": 2}),
        nightly_unless(False, "big_bird", None, "float16", BLOCKS, {}),
        nightly_unless(False, "big_bird", "bigbird:mode=table", "float32", BLOCKS, {"BlockSparseAttention": 1}),
        # Blocks of the paper's size.
        nightly_unless(False, "bert", "etc:global=6,block=84,tokens=3", "float16", {}, {"BlockSparseAttention": 1}),
        ("reformer", None, "float16", REFORMER, {"ChunkAttention": 2, "LSHAttention": 2}),
        nightly_unless(False, "reformer", None, "float16", REFORMER, {}),
        nightly_unless(False, "bert", "lsh:chunk=64,rounds=4", "float32", {}, {"LSHAttention": 1}),
        nightly_unless(False, "xlnet", None, "float16", XLNET, {"RelativeAttention": 2}),
        nightly_unless(False, "xlnet", None, "float32", XLNET, {"RelativeAttention": 2}),
        nightly_unless(False, "xlnet", None, "float16", XLNET, {}),
        nightly_unless(False, "transfo-xl", None, "float16", TRANSFO_XL, {"RelativeAttention": 1}),
        # By TensorRT's own layers: there is no plugin.
        nightly_unless(False, "longt5", None, "float16", {"num_layers": 1}, {}),
        nightly_unless(False, "longt5", None, "float32", {"num_layers": 1}, {}),
        nightly_unless(False, "longt5", None, "float16", {"encoder_attention_type": "local"}, {}),
        # Of one graph.
        nightly_unless(False, "t5", None, "float32", T5, {"ClippedDistanceAttention": 1}),
        *(
            nightly_unless(False, "t5", None, "float16", T5, plugins)
            for plugins in ({}, {"ClippedDistanceAttention": 1})
        ),
        nightly_unless(False, "mpnet", None, "bfloat16", {}, {"ClippedDistanceAttention": 1}),
        nightly_unless(False, "nezha", None, "float16", {}, {"ClippedDistanceAttention": 1}),
        # A local layer and a global one.
        # In every run, test_recurrent_windows.py has windows, and test_query_scale.py dense attention.
        nightly_unless(False, "gemma3_text", None, "float16", GEMMA, {"SlidingWindowAttention": 1}),
        nightly_unless(False, "gemma3_text", None, "bfloat16", GEMMA, {}),
        *(
            nightly_unless(False, name, None, "float16", sizes, {"SlidingWindowAttention": 1})
            for name, sizes in (
                ("ultrabert", TWO),
                ("neomme", TWO | {"head_dim": 32}),
                ("embedding_gemma2_text", WIDER),
            )
        ),
        nightly_unless(False, "umt5", None, "float32", T5, {}),
        nightly_unless(False, "deberta-v2", None, "float16", {}, {}),
        nightly_unless(False, "deberta", None, "float32", {}, {}),
    ],
)
def test_an_engine_is_built(
    tiny_bundles,
    tmp_path: Path,
    model_type: str,
    spec: str | None,
    precision: str,
    changes: dict[str, int],
    plugins: dict[str, int],
) -> None:
    """From the portable graph of a bundle, as a build makes it as well."""
    sizes = changes if model_type == "reformer" else {"num_hidden_layers": 1, **SIZES, **changes}
    bundle = tiny_bundles(model_type, precision=precision, max_len=MAX_LEN, attention=spec, **sizes)
    output = tmp_path / "bundle"
    engines = EngineOptions(
        variants=(Backend.TENSORRT_RTX,),
        attention_impl=AttentionImpl.PLUGIN if plugins else AttentionImpl.NATIVE,
        profiles=PROFILES,
        # That there are kernels for every GPU of an engine is tested with the kernels.
        architectures=(ARCHITECTURE_OF_TYPE.get(model_type, "sm86"),),
    )
    manifest = rebuild(RebuildOptions(bundle=bundle.path, output=output, engines=engines))
    if model_type == "big_bird" or str(spec).startswith("etc"):
        mode = "table" if str(spec).endswith("table") else "none" if spec else "hf_eval"
        assert recorded(manifest, "blocks").mode == mode
    (engine,) = manifest.engines
    remembers = model_type in ("transfo-xl", "xlnet")
    assert {profile.memory for profile in engine.profiles} == {(1, MEMORY, MEMORY) if remembers else None}
    assert engine.profiles == with_memory(PROFILES, most=MEMORY if remembers else 0)
    assert (output / engine.file).stat().st_size > 10_000
    assert json.loads((output / engine.metadata).read_text())["plugins"] == plugins
    kernels = {Path(name).name for name in manifest.files if name.startswith("kernels/")}
    assert {name.partition("-")[0] for name in kernels} == set(plugins)
