"""`hdexport inspect` shows what is in a bundle, and refuses one that is damaged."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from hdexport.cli import verification_table
from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import (
    Default,
    Fill,
    GraphFile,
    InputSpec,
    Positions,
    ProfileShape,
    Role,
    TensorSpec,
)
from hdruntime.bundle.manifest_json import manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.verification import GraphVerification, Skip, SkipCause, Status, Tolerance, VerificationRecord
from support import tiny_bundle
from support.commands import Command
from support.tiny_bundle import INPUTS, engine_file


def graph_with_a_branch() -> onnx.ModelProto:
    """Outside: one Equal and one If. In each branch: one Gather."""
    return onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        branching (int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask)
            => (float[batch, tokens, 2] logits)
            <float[3, 2] table = {0, 0, 0, 0, 0, 0}, int64 zero = {0}> {
          is_true = Equal(zero, zero)
          logits = If (is_true) <
            then_branch = a () => (float[batch, tokens, 2] x) { x = Gather(table, input_ids) },
            else_branch = b () => (float[batch, tokens, 2] y) { y = Gather(table, input_ids) }
          >
        }
    """)


PROFILE = ProfileShape(batch=(1, 1, 8), tokens=(1, 128, 128), memory=(1, 384, 384))
ENGINE = engine_file("tiny", precision="float16", architectures=("sm89", "sm120"), profiles=(PROFILE,))
OPERATORS = {"Gather": 2, "Equal": 1, "If": 1}

CHANGES: dict[str, Any] = {
    "name": "tiny",
    "model_type": "roberta",
    "task": "token-classification",
    "max_len": 4096,
    "dtype": "float16",
    "parameters": 22713216,
    "positions": Positions(scheme="hierarchical", alpha=0.4, base=512, rows=4096, first_row=2, form="folded"),
    "operators": {"hdexport::Attention": 6},
    "inputs": INPUTS[:2],
    "outputs": (TensorSpec(name="logits", dtype="float32", shape=("batch", "tokens", 2)),),
    "graphs": (GraphFile(file="model.onnx", lowering="portable", dtype="float16", operators=OPERATORS),),
    "engines": (ENGINE,),
    "labels": ("negative", "[bold]positive"),
    "verification": VerificationRecord(
        passed=True,
        grid="full",
        graphs={
            "model.onnx": GraphVerification(
                status=Status.PASS, checks=40, passed=40, max_abs_error=2e-6, tolerance=Tolerance(atol=1e-4, ulps=2)
            )
        },
        skipped=(Skip(cause=SkipCause.NO_GPU, graph="engines/tiny.engine", backend="tensorrt_rtx"),),
    ),
    "made_by": {
        "command": "hdexport build tiny --max-len 4096 --fp16",
        "source": "",
        "hdexport": "0.1.0",
        "torch": "2.13.0",
    },
}


def make_bundle(path: Path) -> Path:
    tiny_bundle.make_bundle(path)
    (path / "engines").mkdir()
    (path / "engines" / "tiny.engine").write_bytes(bytes(2_500_000))
    (path / "engines" / "tiny.json").write_text(
        '{"variant": "tensorrt_rtx", "plugins": ["Windowed"], "built_on": {"driver": null, "gpu": "RTX 4090"}}'
    )
    onnx.save(graph_with_a_branch(), path / "model.onnx")
    change(path, **CHANGES)
    return path


def change(path: Path, **changes: object) -> None:
    """Change what the manifest of a bundle says."""
    seal(path, dataclasses.replace(manifest_from_json((path / "manifest.json").read_bytes()), **changes))  # type: ignore[arg-type]


def lines_of(shown: str) -> list[str]:
    return [" ".join(line.split()) for line in shown.splitlines()]


LINES = [
    "model tiny (roberta)",
    "task token-classification",
    "accepts 1 to 4096 tokens",
    "parameters 22,713,216 in float16",
    "positions hierarchical, alpha 0.4: 4096 from the checkpoint's 512 rows (from row 2), folded",
    "attention hdexport::Attention x6",
    "labels negative, [bold]positive",
    "tokenizer tokenizer.json, ids of transformers' class, pads with [PAD] (0)",
    "verification passed, full grid, 40 of 40 cases",
    "graph precision status cases max abs error min cosine tolerance, or why skipped",
    "model.onnx float32 PASS 40 2.00e-06 - abs 0.0001 or 2 ulp",
    "engines/tiny.engine - SKIP 0 - - needs an NVIDIA GPU: hdexport verify BUNDLE --backend tensorrt_rtx",
    "made: command hdexport build tiny --max-len 4096 --fp16",
    "made: with hdexport 0.1.0, torch 2.13.0",
    "input input_ids int64 [batch, tokens] 0 to 10",
    "input attention_mask int64 [batch, tokens] 0 to 1",
    "output logits float32 [batch, tokens, 2]",
    "model.onnx portable float16 4 Gather 2, Equal 1, If 1",
    "made for tensorrt_rtx 1.7.1, sm89, sm120",
    "profile 0 batch 1:1:8, tokens 1:128:128, memory 1:384:384 (min:opt:max)",
    "plugins Windowed",
    "built_on driver none, gpu RTX 4090",
]
"""What is shown of the bundle."""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """One to change."""
    return make_bundle(tmp_path / "tiny-4096-float16")


def test_it_shows_all_that_the_manifest_the_graphs_and_the_metadata_say(hdexport: Command, bundle: Path) -> None:
    """Piped, without colours."""
    done = hdexport("inspect", bundle)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = lines_of(done.stdout)
    assert set(LINES) - set(lines) == set()
    # Before the hash of the file.
    assert "engines/tiny.engine 2.5 MB" in [line.rpartition(" ")[0] for line in lines]


def test_what_a_bundle_may_have_besides_is_described(hdexport: Command, bundle: Path) -> None:
    engine = dataclasses.replace(ENGINE, version_compatible=True)
    change(bundle, engines=(engine,), ffn_chunk=1024, operators={})
    lines = lines_of(hdexport("inspect", bundle).stdout)
    assert "made for tensorrt_rtx 1.7.1 and later, sm89, sm120" in lines
    assert "feed-forward chunks of up to 1024 tokens in ONNX Runtime, none in engines" in lines
    assert "attention standard operators" in lines


def test_the_values_of_inputs_are_shown(hdexport: Command, bundle: Path) -> None:
    memory = InputSpec(
        name="memory", dtype="float32", shape=("batch", 7), role=Role.RECURRENT_STATE, default=Default(fill=Fill.ZEROS),
        fed_from="left",
    )  # fmt: skip
    left = TensorSpec(name="left", dtype="float32", shape=("batch", 7))
    manifest = open_bundle(bundle).manifest
    change(bundle, inputs=(*INPUTS, memory), outputs=(*manifest.outputs, left), graphs=())
    lines = lines_of(hdexport("inspect", bundle).stdout)
    assert "input token_type_ids int64 [batch, tokens] 0 to 1" in lines
    assert {"input memory float32 [batch, 7]", "output left float32 [batch, 7]"} <= set(lines)


def test_eight_graphs_fit_into_a_hundred_columns(
    hdexport: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ("onnxruntime_cpu", "openvino", "openvino_unpadded")
    graphs = [
        GraphFile(file=f"{name}.onnx", lowering=name, dtype="float32", operators=OPERATORS)
        for name in ("onnxruntime_cuda", *both)
    ]
    graphs += [GraphFile(file=f"{name}_int8.onnx", lowering=name, dtype="int8", operators=OPERATORS) for name in both]
    for graph in graphs:
        (bundle / graph.file).write_bytes((bundle / "model.onnx").read_bytes())
    graphs.append(CHANGES["graphs"][0])
    change(bundle, graphs=tuple(graphs))
    monkeypatch.setattr(verification_table, "_PIPED_WIDTH", 100)
    done = hdexport("inspect", bundle)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert max(map(len, shown.splitlines())) <= 100
    rows = {f"{graph.file} {graph.lowering} {graph.dtype} 4 Gather 2, Equal 1, If 1" for graph in graphs}
    assert rows <= set(lines_of(shown))


def test_json_is_complete(hdexport: Command, bundle: Path) -> None:
    data = json.loads(hdexport("inspect", bundle, "--json").stdout)
    assert data["manifest"]["graphs"][0]["operators"] == {"Gather": 2, "Equal": 1, "If": 1}
    assert data["engine_metadata"]["engines/tiny.engine"]["plugins"] == ["Windowed"]
    assert data["manifest"]["positions"]["first_row"] == 2
    assert data["size_bytes"] == sum(
        path.stat().st_size for path in bundle.rglob("*.*") if path.is_file() and path.name != "manifest.json"
    )


def block_sparse(pattern: str, mode: str, last_block: str, **numbers: int) -> dict[str, object]:
    absent = {"random_blocks": 0, "global_tokens": 0, "dense_tokens": 0}
    described = {"pattern": pattern, "block_size": 64, "mode": mode, "last_block": last_block}
    return {"type": "blocks", **described, **absent, **numbers}


WINDOW = {"tokens": 64, "global_tokens": 2, "dilation": [1, 2]}


DESCRIBED: list[tuple[dict[str, Any], list[str]]] = [
    (
        block_sparse("bigbird", "hf_eval", "padded", random_blocks=3, dense_tokens=704),
        [
            "block-sparse bigbird, blocks of 64 tokens",
            "3 random blocks, all of them block 0, as in Hugging Face",
            "the last block is that of the padded batch, as in Hugging Face: padding changes answers",
            "dense up to 704 tokens",
        ],
    ),
    (
        block_sparse("bigbird", "table", "row", random_blocks=2, dense_tokens=576),
        [
            "block-sparse bigbird, blocks of 64 tokens",
            "2 random blocks, from a table",
            "the last block is each text's own: padding changes nothing",
            "dense up to 576 tokens",
        ],
    ),
    (
        block_sparse("etc", "none", "row", global_tokens=16),
        ["block-sparse etc, blocks of 64 tokens", "16 global tokens in front of each text"],
    ),
    (
        {"type": "window", "layers": [64, 128, 64], "converted": {**WINDOW, "right": 0}},
        [
            "windows tokens before and after: 64 and 0 in 2 layers, 128 and 0 in 1 layers",
            "made from dense attention; global tokens: the first 2; dilation 1/2",
        ],
    ),
]


def test_attention_is_described_in_full(hdexport: Command, bundle: Path) -> None:
    for spec, lines in DESCRIBED:
        change(bundle, num_heads=2, attention=(spec,))
        shown = lines_of(hdexport("inspect", bundle).stdout)
        first = shown.index(lines[0])
        assert shown[first : first + len(lines)] == lines
        assert shown[first + len(lines)].startswith("labels"), "and no more"
    assert json.loads(hdexport("inspect", bundle, "--json").stdout)["manifest"]["attention"] == [spec]


def test_global_tokens_are_described(hdexport: Command, bundle: Path) -> None:
    for default, bound, line in (
        (Default(fill=Fill.UNTIL_TOKEN, token_id=3), 4, "global tokens the question's tokens unless given, at most 4"),
        (Default(fill=Fill.FIRST_TOKEN), None, "global tokens the first token unless given"),
        (Default(fill=Fill.ZEROS), 4, "global tokens none unless given, at most 4"),
    ):
        shape, role = ("batch", "tokens"), Role.GLOBAL_ATTENTION_MASK
        marks = InputSpec(name="marks", dtype="int64", shape=shape, role=role, default=default, bound=bound)
        change(bundle, inputs=(*INPUTS[:2], marks), graphs=())
        assert line in lines_of(hdexport("inspect", bundle).stdout)


def test_it_imports_no_library_of_arrays_or_graphs(hdexport: Command, bundle: Path) -> None:
    """Their imports would take longer than all else; checked on a window, which describes itself."""
    change(bundle, num_heads=2, attention=(DESCRIBED[-1][0],))
    libraries = ("numpy", "onnx", "onnx_ir", "onnxruntime", "torch", "transformers")
    script = f"import sys\nfor name in {libraries}: sys.modules[name] = None\n"
    script += "from hdexport.cli import main\nsys.exit(main(sys.argv[1:]))"
    alone = subprocess.run([sys.executable, "-c", script, "inspect", bundle], capture_output=True, text=True)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == hdexport("inspect", bundle).stdout


def test_files_are_read_on_request_only(hdexport: Command, bundle: Path) -> None:
    graph = bundle / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\1")
    assert "Files, sizes checked" in lines_of(hdexport("inspect", bundle).stdout)
    done = hdexport("inspect", bundle, "--checksums")
    assert done.returncode == 1
    assert "The file model.onnx of the bundle" in done.stderr
    assert "has changed: expected sha256" in done.stderr
    graph.write_bytes(graph.read_bytes()[:-1])
    assert re.search("has changed: expected .* bytes, found", hdexport("inspect", bundle).stderr)
