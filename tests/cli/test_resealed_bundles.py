"""Bundles that were changed: a command refuses one, or, with right checksums, works or has an error of one message."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import hdruntime
from hdexport.attention.registry import attention_of
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import PairTemplate, Wording
from hdruntime.errors import BundleCorruptError, HdexportError
from hdruntime.tasks.of_bundle import task_of_bundle
from support.commands import Command, Refused
from support.comparators import named_case
from support.every_key import ENGINE, PARTS, bundles_of_every_key, resealed, write_manifest_values
from support.grids import nightly_unless
from support.tiny_bundle import make_bundle


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tests restore what they change."""
    return bundles_of_every_key(tmp_path_factory.mktemp("resealed"))


@pytest.fixture
def bundle(bundles: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A bundle and its manifest, which are restored."""
    path = bundles[getattr(request, "param", "engine")]
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    yield path, json.loads((path / "manifest.json").read_text())
    for file in path.rglob("*"):
        if file.is_file() and file not in before:
            file.unlink()
    for file, data in before.items():
        file.write_bytes(data)


def use(path: Path) -> None:
    """Everything that reads a bundle without PyTorch; it may raise an `HdexportError`."""
    bundle = open_bundle(path)
    task_of_bundle(bundle)
    with hdruntime.load(bundle, "onnxruntime") as session:
        session(input_ids=[[2, 4, 3], [2, 5, 3]], attention_mask=[[1, 1, 1], [1, 1, 0]])
        pairs = ["are", "read whole"] if isinstance(bundle.manifest.template, PairTemplate) else None
        encodings = session.tokenize(["long documents", ""], pairs, prompt="" if pairs is None else "whole")
        session.infer(encodings)
        if bundle.manifest.task == "sentence-similarity":
            session.embed(["whole"])


def inspected(hdexport: Command, path: Path, *options: str) -> str:
    """The error of `hdexport inspect`, which must be a translated one; nothing where it works.

    Libraries may warn either way: onnx_ir does for a graph whose nodes read values without a producer.
    """
    done = hdexport("inspect", path, *options)
    assert done.returncode in (0, 1)
    assert len(re.findall("^error: ", done.stderr, re.MULTILINE)) == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert "add --debug" not in done.stderr, "an error without a translation"
    assert (done.stdout == "") == (done.returncode == 1)
    return done.stderr if done.returncode else ""


# What once gave tracebacks


def changed(manifest: dict[str, Any], where: str, value: object) -> dict[str, Any]:
    """A manifest in which what is at a place, like ``outputs/0/name``, is another value."""
    result = copy.deepcopy(manifest)
    *parents, last = [int(part) if part.isdecimal() else part for part in where.split("/")]
    place: Any = result
    for key in parents:
        place = place[key]
    place[last] = value
    return result


DEEP: list[Any] = []
for _ in range(400):
    DEEP = [DEEP]


WRONG = [
    ("verification/graphs/a", 5, r"manifest\.verification\.graphs\['a'\] should be `object`, not 5"),
    ("verification/graphs/model.onnx/max_abs_error", "x", r"max_abs_error should be `float \| null`, not \"x\""),
    ("verification/information", DEEP, r"not valid JSON: more than \d+ lists and objects"),
    ("outputs", [], r"manifest\.outputs has no last_hidden_state"),
    ("outputs/1/name", "last_hidden_state", r"manifest\.outputs has 2 of last_hidden_state"),
    ("outputs/1/dtype", "int64", r"manifest\.outputs\[1\] should be float32 \[batch, \.\.\.\]"),
    ("outputs/1/shape/1", 10**400, r"manifest\.outputs\[1\]\.shape\[1\]"),
    ("outputs/1/shape", ["batch", "tokens", 4], r"sentence_embedding should be \[batch, embedding_size\]"),
    ("outputs/1/shape/1", 5, r"sentence_embedding float32 \[batch, 4\].* but the manifest of .* lists "),
    ("outputs/0/shape/2", 5, r"last_hidden_state float32 \[batch, tokens, 4\].* but the manifest of .* lists "),
    ("inputs/1/role", "global_attention_mask", r"manifest\.inputs has 0 of the role mask; exactly one is needed"),
    ("inputs/1/name", "mask", r"The inputs of .* but the manifest of .* lists .*, mask int64 \[batch, tokens\]"),
    ("inputs/2/role", "segments", r"manifest\.inputs\[2\]\.role should be one of 'ids', .*\n.*\n.*pip install -U"),
    ("name", "\ud800", r"not valid JSON"),
    ("positions/alpha", float("nan"), r"not valid JSON"),
    ("positions/alpha", None, r"manifest\.positions\.alpha is None for the scheme hierarchical"),
    ("ffn_chunk", 0, r"manifest\.ffn_chunk should be"),
    ("positions/rope_factor", 2.0, r"positions\.rope_factor is 2\.0 for the form folded; only computed has one"),
    ("positions/rows", 17, r"manifest\.positions\.rows is 17, but max_len is 16"),
    ("attention", [{}], r"manifest\.attention\[0\]\.type should be the name of an attention type, not None"),
    ("attention", [{"type": "a"}] * 2, r"manifest\.attention has 2 of a"),
    ("padding", {"multiple_of": 0}, r"manifest\.padding\.multiple_of should be `int` >= 1, not 0"),
    ("task", "fill-mask", r"manifest\.outputs has no logits, which fill-mask needs"),
    ("max_len", 2**24 + 1, r"manifest\.max_len should be `int` <= 16777216, not 16777217"),
    ("graphs/0/lowering", "onnxruntime_cpu", r"manifest\.graphs has 2 of onnxruntime_cpu"),
    ("engines/0/profiles", [], r"manifest\.engines\[0\]\.profiles is empty"),
    ("engines/0/profiles/0/batch", [8, 1, 8], r"profiles\[0\] should be \(min, opt, max\), not \(8, 1, 8\)"),
    ("labels", ["a"], r"manifest\.labels has 1 names, but there are no logits"),
    ("tokenizer/source", "neither", r"manifest\.tokenizer\.source should be one of 'file', 'library'"),
    (
        "sentence/text_template/plain/parts/0/slot",
        "query",
        r"manifest\.sentence\.text_template\.plain\.parts has the slots query; text is needed, and each of text is",
    ),
    ("files/config.json/sha256", "5", r"manifest\.files\['config\.json'\]\.sha256 should be `str` matching regex"),
]
"""Place, value -> what is said of it."""

SLOTS = r"manifest\.sentence\.pair_template\.%s\.parts has the slots %s; query and document are needed, and each of"
PLAIN, PROMPTED = "sentence/pair_template/plain", "sentence/pair_template/prompted"
WRONG_PAIRS = [
    (f"{PLAIN}/parts", [], SLOTS % ("plain", r"\(none\)")),
    (f"{PLAIN}/parts/0/slot", "document", SLOTS % ("plain", "document, document")),
    (f"{PROMPTED}/parts/1/slot", "prompt", SLOTS % ("prompted", "prompt, prompt, document")),
]
OF_AN_ENCODER = (
    "sentence",
    {
        "kind": "encoder",
        "max_seq_length": 4,
        "pair_template": {"plain": dataclasses.asdict(Wording(parts=PARTS, after="")), "prompted": None},
    },
    r"manifest\.sentence\.pair_template is there for the kind encoder, which reads no pairs",
)

LABELS = ("labels", ["a", "b"], r"manifest\.labels has 2 names for logits float32 \[batch, 4\]")


OF_KINDS = {
    "blocks": [("pattern", "etc", r"manifest\.attention\[0\]\.mode should be none for etc, not hf_eval")],
    "engine": [("layers", [-1], r"manifest\.attention\[0\]\.layers\[0\] should be `int` >= 0, not -1")],
}
"""Bundle -> place in the record of its attention, value, and what is said of it."""


@pytest.mark.parametrize(
    ("bundle", "wrongs"),
    [("engine", [*WRONG, OF_AN_ENCODER]), ("pairs", WRONG_PAIRS), ("blocks", [LABELS])],
    indirect=["bundle"],
    ids=["engine", "pairs", "blocks"],
)
def test_what_contradicts_the_format_is_named(
    bundle: tuple[Path, dict[str, Any]], hdexport: Command, wrongs: list[tuple[str, object, str]]
) -> None:
    """Keys of inputs: tests/runtime/bundle/test_input_roles.py."""
    path, manifest = bundle
    for where, value, message in wrongs:
        write_manifest_values(path, changed(manifest, where, value))
        # inspect shows the manifest, and reads no graph.
        is_of_graph = "but the manifest of" in message
        assert is_of_graph or re.search(message, inspected(hdexport, path)), (where, message)
        with pytest.raises(BundleCorruptError, match=message):
            use(path)


@pytest.mark.parametrize("bundle", OF_KINDS, indirect=True)
def test_what_contradicts_a_kind_of_attention_is_named_by_inspect(
    bundle: tuple[Path, dict[str, Any]], hdexport: Command
) -> None:
    """The runtime ignores the record: the bundle runs."""
    path, manifest = bundle
    for where, value, message in OF_KINDS["blocks" if "blocks" in path.name else "engine"]:
        write_manifest_values(path, changed(manifest, f"attention/0/{where}", value))
        assert re.search(message, inspected(hdexport, path)), (where, message)
        use(path)


def test_a_name_longer_than_any_file_system_takes_is_refused(bundle: tuple[Path, dict[str, Any]]) -> None:
    path, manifest = bundle
    manifest["files"]["x" * 1000] = {"sha256": "0" * 64, "size_bytes": 1}
    write_manifest_values(path, manifest)
    with pytest.raises(HdexportError, match=r"cannot be read: .*name too long"):
        open_bundle(path)


# Files other than the manifest


def damaged(data: bytes, seed: int) -> bytes:
    """With a few bytes changed, or cut short, or something else."""
    chosen = random.Random(seed)
    if seed == 0:
        return b""
    if seed == 1:
        return b"\x08\x0a" + b"\xff" * 200
    if seed % 3 == 0:
        return data[: chosen.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(seed):
        changed[chosen.randrange(len(changed))] = chosen.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("seed", [nightly_unless(seed in (0, 1, 3), seed) for seed in range(6)])
def test_a_damaged_graph_is_refused_or_works(bundle: tuple[Path, dict[str, Any]], hdexport: Command, seed: int) -> None:
    path, manifest = bundle
    for graph in manifest["graphs"]:
        (path / graph["file"]).write_bytes(damaged((path / graph["file"]).read_bytes(), seed))
    resealed(path, manifest)
    assert not inspected(hdexport, path), "inspect reads no graph"
    try:
        use(path)
    except HdexportError:
        return
    assert seed >= 2, "a graph that nothing can read works"


def test_no_command_is_broken_by_a_damaged_graph(
    refused: Refused, built: subprocess.CompletedProcess[str], checkpoint: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(built.args[-1], copied)
    manifest = json.loads((copied / "manifest.json").read_text())
    for graph in manifest["graphs"]:
        (copied / graph["file"]).write_bytes(damaged((copied / graph["file"]).read_bytes(), 3))
    resealed(copied, manifest)
    (tmp_path / "in.txt").write_text("long documents")
    unread = r"model\.onnx .*cannot be read: |cannot load .*\.onnx: "
    refused("verify", copied, "--model", checkpoint, message=unread)
    refused("rebuild", copied, "--target", "tensorrt-rtx", message=unread)
    refused("run", copied, tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", message=unread)


def test_malformed_engine_metadata_is_refused(bundle: tuple[Path, dict[str, Any]], hdexport: Command) -> None:
    path, manifest = bundle
    for text in ("", "[]", '{"a": NaN}', "[" * 5000, "\ud800"):
        (path / ENGINE.metadata).write_text(text, errors="surrogatepass")
        assert re.search(r"metadata .*rtx\.json cannot be read", inspected(hdexport, resealed(path, manifest)))


@pytest.mark.parametrize("bundle", ["blocks"], indirect=True)
def test_a_malformed_configuration_is_refused(bundle: tuple[Path, dict[str, Any]]) -> None:
    path, manifest = bundle
    for text in ("", "[]", "[" * 5000):
        (path / "config.json").write_text(text)
        with pytest.raises(BundleCorruptError, match=r"config\.json (cannot be read|should hold an object)"):
            task_of_bundle(open_bundle(resealed(path, manifest)))


TABLES = [
    ("blocks", None, r"lists no file 'listed_blocks\.npy'"),
    ("blocks", b"\x93NUMPY\x01\x00v\x00{", r"listed_blocks\.npy .* cannot be read"),
    ("blocks", np.zeros((1, 1, 8, 1), np.int64), r"holds int64 \[1, 1, 8, 1\]; its manifest wants int32 of 4 axes"),
    ("blocks", np.full((1, 1, 8, 1), 8, np.int32), r"holds \[1, 1, 8, 1\] of blocks 8 to 8"),
    ("bigbird", np.zeros((1, 1, 8, 1), np.int32), r"\[layers, 1 or 1, 6, listed\] of blocks -1 to 7"),
    ("etc", np.zeros((2, 4), np.float32), r"holds 2 rows; its manifest wants 3 finite rows"),
    ("etc", np.full((3, 4), np.nan, np.float32), r"holds NaN or infinity; its manifest wants 3 finite rows"),
]
"""Pattern, what its file holds -> what is said of it."""


@pytest.mark.parametrize("bundle", ["blocks"], indirect=True)
def test_tables_that_are_not_the_manifests_are_refused(bundle: tuple[Path, dict[str, Any]]) -> None:
    path, original = bundle
    for pattern, array, message in TABLES:
        manifest = copy.deepcopy(original)
        mode = {"bigbird": "table", "blocks": "lists", "etc": "none"}[pattern]
        manifest["attention"][0].update(pattern=pattern, mode=mode, global_tokens=3)
        name = "global_embeddings.npy" if pattern == "etc" else "listed_blocks.npy"
        if array is not None:
            manifest["files"][name] = {}
            (path / name).write_bytes(array) if isinstance(array, bytes) else np.save(path / name, array)
        opened = open_bundle(resealed(path, manifest))
        (attention,) = attention_of(opened.manifest)
        with named_case(message), pytest.raises(BundleCorruptError, match=message):
            attention.type.read(attention.record, opened)


# Anything


Path_ = tuple[str | int, ...]


def places(value: object, at: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*at, key)
            yield from places(inner, (*at, key))


STRANGE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 7, 16, 2**24, 2**31, 2**63, 10**12, 10**30, 10**400),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "a\udc80", "\u202e", "../x", "/etc/passwd", "tokens", "batch", "float32", "row", "none"),
    *([], {}, [[]], {"a": 5}, [None], ["batch", "tokens"], ["batch", "tokens", 4], ["batch", 4], DEEP),
]
"""What a value is replaced by, beside other values of the same manifest."""

MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["replace", "delete", "repeat", "copy"]), st.integers(0, 10**6), st.integers(0, 10**6)),
    min_size=1,
    max_size=3,
)


def mutated(manifest: dict[str, Any], mutations: list[tuple[str, int, int]]) -> dict[str, Any]:
    manifest = copy.deepcopy(manifest)
    for kind, place, choice in mutations:
        paths = list(places(manifest))
        if not paths:
            break
        *parents, last = paths[place % len(paths)]
        parent: Any = manifest
        for key in parents:
            parent = parent[key]
        if kind == "delete":
            del parent[last]
        elif kind == "replace":
            parent[last] = copy.deepcopy(STRANGE[choice % len(STRANGE)])
        elif kind == "copy":
            other: Any = manifest
            for key in paths[choice % len(paths)]:
                other = other[key]
            parent[last] = copy.deepcopy(other)
        elif isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        else:
            parent[f"{last} again"] = copy.deepcopy(parent[last])
    return manifest


@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_manifest_of_anything_is_refused_or_works(bundles: dict[str, Path], hdexport: Command, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(name=st.sampled_from(["engine", "blocks", "pairs"]), mutations=MUTATIONS)
    def check(name: str, mutations: list[tuple[str, int, int]]) -> None:
        path = bundles[name]
        whole = (path / "manifest.json").read_bytes()
        try:
            write_manifest_values(path, mutated(json.loads(whole), mutations))
            try:
                use(path)
            except HdexportError as error:
                str(error).encode()
            if not inspected(hdexport, path):
                inspected(hdexport, path, "--json")
        finally:
            (path / "manifest.json").write_bytes(whole)

    check()


def test_a_changed_file_is_refused_by_every_command(refused: Refused, tmp_path: Path) -> None:
    bundle: Path = make_bundle(tmp_path / "bundle")
    data = bytearray((bundle / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / "model.onnx").write_bytes(data)
    (tmp_path / "texts.txt").write_text("long documents")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for command, *arguments in (
        ("inspect", "--checksums"),
        ("verify",),
        ("run", tmp_path / "texts.txt", "-o", tmp_path / "out.jsonl"),
        ("bench", "-o", tmp_path / "bench"),
    ):
        message = r"model\.onnx .* has changed: expected sha256 .*\nRebuild or copy the bundle again"
        assert refused(command, bundle, *arguments, message=message) == "", command
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
