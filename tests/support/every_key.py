"""Bundles that together have every key of a manifest, and the function that seals one again after a change."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import Default, Fill, KernelNode, PaddingRule
from hdruntime.bundle.manifest_json import with_checksum
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import PairTemplate, SentenceSettings, TemplatePart, TextTemplate, Wording
from hdruntime.bundle.verification import (
    Case,
    GraphVerification,
    Skip,
    SkipCause,
    Status,
    Tolerance,
    VerificationRecord,
)
from hdruntime.errors import BundleCorruptError
from support.tiny_bundle import INPUTS, engine_file, make_bundle

VERIFICATION = VerificationRecord(
    passed=False,
    grid="full",
    graphs={
        "model.onnx": GraphVerification(
            status=Status.FAIL,
            files=("model.onnx",),
            precision="float32",
            checks=4,
            passed=3,
            max_abs_error=2e-6,
            min_cosine=0.5,
            tolerance=Tolerance(
                atol=1e-4, ulps=2, rtol=1e-6, cosine=0.5, length=0.02, token_length=0.1, score_spread=0.05
            ),
            tokens=(1, 2),
            failed=(Case(tokens=2, lengths=(2, 1), padding="right"),),
            sampled=(Case(tokens=1, lengths=(1,)),),
        )
    },
    skipped=(
        Skip(
            cause=SkipCause.BACKEND,
            graph="onnxruntime_cuda.onnx",
            case=Case(tokens=1, lengths=(1,)),
            needed=2,
            limit=1,
            backend="onnxruntime_cuda",
            detail="no driver",
        ),
    ),
    information=("off softmax attention by 0.1",),
)
KERNEL_NODE = KernelNode(
    op_type="SlidingWindowAttention_1",
    operator="SlidingWindowAttention",
    shapes=((1, 1, 2, 32), (1, 1)),
    attributes={"left": 3, "scale": 0.5, "dilation": [1, 2]},
    architectures=("sm90",),
)
METADATA = {
    "plugins": {"SlidingWindowAttention": 1},
    "engine_sha256": "0" * 64,
    "onnx_sha256": {"model.onnx": "0" * 64},
    "built_on": {"platform": "linux", "driver": None, "gpu": None, "date": "2026-01-01"},
}
ENGINE = engine_file("rtx")
WINDOW = {"type": "window", "layers": (3,), "converted": {"tokens": 3, "global_tokens": 1, "dilation": (1,)}}
BLOCKS = {
    "block_size": 2,
    "mode": "hf_eval",
    "random_blocks": 1,
    "global_tokens": 0,
    "last_block": "padded",
    "dense_tokens": 4,
}
AFTER_SEPARATOR = dataclasses.replace(INPUTS[2], default=Default(fill=Fill.AFTER_TOKEN, token_id=3))
PARTS = (TemplatePart(before="long", slot="query"), TemplatePart(before="are", slot="document"))
PAIRS = SentenceSettings(
    kind="cross-encoder",
    max_seq_length=16,
    prompts={"web": "documents"},
    activation="softmax",
    pair_template=PairTemplate(
        plain=Wording(parts=PARTS, after="."),
        prompted=Wording(parts=(TemplatePart(before="", slot="prompt"), *PARTS), after="."),
    ),
)

TEXT = (TemplatePart(before="long", slot="text"),)
TEXTS = SentenceSettings(
    kind="encoder",
    max_seq_length=16,
    text_template=TextTemplate(
        plain=Wording(parts=TEXT, after="."),
        prompted=Wording(parts=(TemplatePart(before="", slot="prompt"), *TEXT), after="."),
        strips=True,
    ),
)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def bundles_of_every_key(folder: Path) -> dict[str, Path]:
    """Three bundles that together have every key of a manifest."""
    made = {
        "engine": make_bundle(folder / "engine", task="sentence-similarity", token_types=True, cpu_graph=True),
        "blocks": make_bundle(
            folder / "blocks", task="text-classification", padding=PaddingRule(multiple_of=2, free_up_to=4)
        ),
        "pairs": make_bundle(folder / "pairs", task="text-classification"),
    }
    (made["engine"] / "engines").mkdir()
    (made["engine"] / ENGINE.file).write_bytes(b"no engine")
    write_json(made["engine"] / ENGINE.metadata, METADATA)
    more = {
        "engine": {
            "engines": (ENGINE,),
            "verification": VERIFICATION,
            "attention": (WINDOW,),
            "inputs": (*INPUTS[:2], AFTER_SEPARATOR),
            "sentence": TEXTS,
        },
        "blocks": {
            "labels": ("a", "b", "c", "d"),
            "verification": VERIFICATION,
            "kernel_nodes": (KERNEL_NODE,),
            "attention": ({"type": "blocks", "pattern": "bigbird", **BLOCKS, "converted": True},),
        },
        "pairs": {"sentence": PAIRS},
    }
    for name, path in made.items():
        seal(path, dataclasses.replace(open_bundle(path).manifest, **more[name]))
    return made


def write_manifest_values(bundle: Path, manifest: object) -> None:
    """Write a bundle's manifest with its checksum, or without where its values have none."""
    text = json.dumps(manifest)
    with contextlib.suppress(BundleCorruptError):
        text = with_checksum(text)
    (bundle / "manifest.json").write_text(text, encoding="utf-8")


def resealed(bundle: Path, manifest: dict[str, Any]) -> Path:
    """The bundle with that manifest, and the checksums of its files."""
    for name, record in manifest["files"].items():
        data = (bundle / name).read_bytes()
        record.update(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    write_manifest_values(bundle, manifest)
    return bundle
