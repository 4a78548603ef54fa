"""With --recurrence, segments get Hugging Face's answers to the whole document, under a mask of all pairs.

Other specs and families are nightly: these have both sides, causal windows, dilation, shared layers and padding ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from hdexport.attention.attention_type import ConversionContext
from hdexport.attention.registry import attention_conversions, attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.engines.build import EngineOptions
from hdexport.families import family_of
from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
from hdexport.graph.targets.tensorrt.profiles import profiles_from_options
from hdexport.rebuild import RebuildOptions, rebuild
from hdexport.verify import Grid, Verification, verify_bundle
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.bundle.graph_interface import state_at_start
from hdruntime.bundle.manifest import Backend, Manifest, Scheme, Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError
from support.answers import ATOL, distance
from support.commands import run_here
from support.comparators import assert_close, assert_same_directions, named_case
from support.grids import nightly_unless
from support.needs import needs_rtx
from support.tampered_bundles import tampered
from support.tiny_models import PAD_TOKEN_ID, VOCAB_SIZE, save_tiny_model
from support.windowed import WINDOWED_TYPES, expected_of, pair_mask

Feeds = dict[str, np.ndarray]
Call = Callable[..., Feeds]

SEGMENTS = np.array([(9, 37, 16, 23, 40), (5, 37, 1, 23, 12), (9, 20, 0, 16, 40)])
"""[documents, segments], tokens: longer and shorter than windows and memories. One document waits while others go on.

The checkpoints have positions for the first three.
"""

MOST = 48
"""Of --recurrence; a call may have any smaller memory."""

BOTH_SIDES, CAUSAL = "window:16,global:0", "window:16,right:0,global:0"
CARRYING_TYPES = [name for name in WINDOWED_TYPES if family_of(name).learned_positions]

ACROSS = "window:12,right:5,global:0,dilation:1/1/2/3"
"""With its dilation of 3 it reaches over a segment of 16 or 23 tokens into the one before."""


def feeds_of(ids: np.ndarray, mask: np.ndarray, manifest: Manifest) -> Feeds:
    """What a bundle is given, but for its memories."""
    feeds = {"input_ids": np.where(mask == 1, ids, PAD_TOKEN_ID), "attention_mask": mask, "token_type_ids": ids % 2}
    return {spec.name: feeds[spec.name] for spec in manifest.inputs if spec.name in feeds}


def documents(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, int64 [documents, tokens], padding on the right."""
    lengths = SEGMENTS[:rows].sum(1)
    ids = np.random.default_rng(rows).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (rows, lengths.max()))
    return ids, (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)


def first_memories(manifest: Manifest, *, rows: int, memory: int) -> Feeds:
    return {spec.name: state_at_start(spec, rows=rows, memory=memory) for spec in manifest.recurrent_states}


def streamed(
    call: Call,
    manifest: Manifest,
    ids: np.ndarray,
    *,
    memory: int,
    disturb: Callable[[Feeds], object] = lambda carried: None,
) -> Iterator[Feeds]:
    """The answers to each segment; `disturb` changes the memories of the second and later calls."""
    carried = first_memories(manifest, rows=len(ids), memory=memory)
    starts = np.zeros(len(ids), np.int64)
    for number, lengths in enumerate(SEGMENTS[: len(ids)].T):
        place = np.arange(lengths.max())
        # What stands in the padding must not matter.
        part = np.take_along_axis(ids, (starts[:, None] + place) % ids.shape[1], axis=1)
        if number:
            disturb(carried)
        outputs = call(**feeds_of(part, (place < lengths[:, None]).astype(np.int64), manifest), **carried)
        shapes = {name: value.shape for name, value in carried.items()}
        carried = {spec.name: outputs[str(spec.fed_from)] for spec in manifest.recurrent_states}
        assert {name: value.shape for name, value in carried.items()} == shapes
        starts += lengths
        yield outputs


def states(segments: Iterator[Feeds]) -> np.ndarray:
    """[tokens, hidden size] of all documents, one behind the other."""
    found = [outputs["last_hidden_state"] for outputs in segments]
    return np.concatenate([
        of_segment[row, :length]
        for row in range(len(found[0]))
        for of_segment, length in zip(found, SEGMENTS[row], strict=True)
    ])  # fmt: skip


def stream_mask(mask: np.ndarray, spec: str, memory: int) -> np.ndarray:
    """[documents, heads, tokens, tokens], True where the third axis sees the fourth."""
    seen = pair_mask(mask, spec)
    for row, lengths in enumerate(SEGMENTS[: len(mask)]):
        for end, tokens in zip(np.cumsum(lengths), lengths, strict=True):
            start = end - tokens
            seen[row, :, start:end, end:] = False
            seen[row, :, start:end, : max(0, start - memory)] = False
    return seen


def whole(bundle: Any, ids: np.ndarray, mask: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Hugging Face's answer to whole documents, under a mask of all pairs; as `states` gives it."""
    return expected_of(bundle, feeds_of(ids, mask, bundle.manifest), pairs)["last_hidden_state"][mask == 1]


def cpu_graph(bundle: Any) -> Call:
    return _graph(bundle.path / "onnxruntime_cpu.onnx")


@functools.cache
def _graph(path: Path) -> Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(path, options)
    outputs = [value.name for value in session.get_outputs()]
    return lambda **feeds: dict(zip(outputs, session.run(outputs, feeds), strict=True))


def reference(bundle: Any) -> Reference:
    return _reference(bundle.path, bundle.checkpoint)


@functools.cache
def _reference(path: Path, checkpoint: Path) -> Reference:
    return reference_of(open_bundle(path), find_checkpoint(checkpoint))


def check(bundle: Any, call: Call, spec: str, *, rows: int, memory: int, cosine: float | None = None) -> None:
    ids, mask = documents(rows)
    expected = whole(bundle, ids, mask, stream_mask(mask, spec, memory))
    found = states(streamed(call, bundle.manifest, ids, memory=memory))
    with named_case(f"{rows} documents, memory {memory}"):
        if cosine is None:
            assert_close(found, expected, atol=ATOL)
        else:
            assert_same_directions(found, expected, cosine=cosine)


@pytest.fixture
def both_sides(tiny_bundles) -> Any:
    """Its positions follow padding ids."""
    return tiny_bundles("roberta", attention=BOTH_SIDES, recurrence=MOST)


@pytest.fixture
def across(tiny_bundles) -> Any:
    """Its layers are one layer that runs several times."""
    return tiny_bundles("albert", attention=ACROSS, recurrence=MOST)


@pytest.fixture
def half(tiny_bundles) -> Any:
    """Heads of 32, the smallest that there are kernels for."""
    sizes = {"hidden_size": 128, "initializer_range": 0.1}
    return tiny_bundles("bert", precision="float16", attention=CAUSAL, recurrence=MOST, **sizes)


@pytest.mark.parametrize(
    ("model_type", "spec"),
    [("albert", ACROSS), *(nightly_unless(False, name, BOTH_SIDES) for name in CARRYING_TYPES)],
)
def test_segments_get_the_answers_of_the_whole_document(tiny_bundles, model_type: str, spec: str) -> None:
    bundle = tiny_bundles(model_type, attention=spec, recurrence=MOST)
    for call in (bundle.portable, cpu_graph(bundle), lambda **feeds: reference(bundle).batch(feeds)):
        check(bundle, call, spec, rows=3, memory=16)


@pytest.mark.parametrize("spec", [BOTH_SIDES, nightly_unless(False, CAUSAL), nightly_unless(False, ACROSS)])
def test_a_memory_may_be_shorter_or_longer_than_a_window(tiny_bundles, spec: str) -> None:
    bundle = tiny_bundles("roberta", attention=spec, recurrence=MOST)
    for call in (bundle.portable, cpu_graph(bundle)):
        for rows, memory in ((1, 1), (1, 16), (3, 8), (3, MOST)):
            check(bundle, call, spec, rows=rows, memory=memory)


def test_causal_windows_do_not_know_of_segments(traced_models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are factored, as those of long documents are; those of other bundles here are folded."""
    monkeypatch.setattr("hdexport.model.positions.FOLDED_LIMIT_BYTES", 0)
    causal = traced_models("bert", attention=CAUSAL, recurrence=MOST)
    ids, mask = documents(3)
    expected = whole(causal, ids, mask, pair_mask(mask, CAUSAL))
    for memory in (16, MOST):
        found = states(streamed(causal.traced, causal.manifest, ids, memory=memory))
        assert_close(found, expected, atol=ATOL)
    too_short = states(streamed(causal.traced, causal.manifest, ids, memory=15))
    assert distance(too_short, expected) > 100 * ATOL


def test_the_runtime_streams_documents(half) -> None:
    ids, mask = documents(1)
    found = [part.outputs["last_hidden_state"] for part in half.session.stream(ids[0].tolist(), segment=23)]
    feeds = feeds_of(ids, mask, half.manifest) | {"token_type_ids": np.zeros_like(ids)}
    expected = expected_of(half, feeds, pair_mask(mask, CAUSAL))["last_hidden_state"]
    assert_same_directions(np.concatenate(found), expected[0], cosine=0.999)


WRONG: dict[str, Callable[[Feeds], object]] = {
    "one layer's shifted by one": lambda carried: carried.update({"mems.1": np.roll(carried["mems.1"], 1, axis=1)}),
    "documents swapped": lambda carried: carried.update({name: value[::-1] for name, value in carried.items()}),
    "position one too far": lambda carried: carried.update({"mems.position": carried["mems.position"] + 1}),
}


def test_the_comparison_sees_a_wrong_memory(both_sides) -> None:
    ids, mask = documents(3)
    expected = whole(both_sides, ids, mask, stream_mask(mask, BOTH_SIDES, MOST))
    for wrong, disturb in WRONG.items():
        # At the second call 9 of 48 places are filled, and windows of 16 reach to others.
        options = {"memory": MOST, "disturb": disturb}
        found = states(streamed(both_sides.portable, both_sides.manifest, ids, **options))
        assert distance(found, expected) > 100 * ATOL, wrong


def test_a_masked_memory_is_none(both_sides) -> None:
    """Whatever it holds."""
    ids, mask = documents(3)
    answers = []
    for memory, noise in ((1, 0), (20, 0), (20, 1)):
        carried = first_memories(both_sides.manifest, rows=3, memory=memory)
        for name in ("mems.0", "mems.1"):
            carried[name] += noise * np.random.default_rng(7).standard_normal(carried[name].shape).astype(np.float32)
        answer = cpu_graph(both_sides)(**feeds_of(ids, mask, both_sides.manifest), **carried)
        answers.append(answer["last_hidden_state"][mask == 1])
    expected = whole(both_sides, ids, mask, pair_mask(mask, BOTH_SIDES))
    for answer in answers:
        assert_close(answer, expected, atol=ATOL)


def verified(bundle: Any, path: Path, grid: Grid = Grid.QUICK) -> Verification:
    return verify_bundle(open_bundle(path), reference(bundle), grid=grid)


@pytest.mark.parametrize(
    ("model_type", "grid"),
    [("albert", Grid.QUICK), *(nightly_unless(False, name, Grid.FULL) for name in ("bert", "roberta"))],
)
def test_a_verification_compares_answers_and_what_is_left(tiny_bundles, model_type: str, grid: Grid) -> None:
    bundle = tiny_bundles(model_type, attention=ACROSS, recurrence=MOST)
    found = verified(bundle, bundle.path, grid)
    assert found.failed == ()
    assert {str(spec.fed_from) for spec in bundle.manifest.recurrent_states} <= set(found.checks[0].outputs)


def test_a_verification_finds_a_memory_that_is_ignored(across, tmp_path: Path) -> None:
    def ignore(model: ir.Model) -> None:
        memory = next(value for value in model.graph.inputs if value.name == "mems.1")
        first = next(node for node in model.graph if memory in node.inputs)
        zeros = ir.node("Sub", [memory, memory])
        model.graph.insert_before(first, zeros)
        for use in memory.uses():
            if use.node is not zeros:
                use.node.replace_input_with(use.idx, zeros.outputs[0])

    wrong = verified(across, tampered(across, tmp_path / "bundle", ignore, "model.onnx"))
    assert not all(check.passed for check in wrong.checks if check.graph == "model.onnx")
    assert all(check.passed for check in wrong.checks if check.graph != "model.onnx")


@needs_rtx
@pytest.mark.parametrize("impl", [AttentionImpl.PLUGIN, nightly_unless(False, AttentionImpl.NATIVE)])
def test_an_engine_is_built(half, tmp_path: Path, impl: AttentionImpl) -> None:
    """For other lengths and another memory than the traced ones, 37 and 23."""
    engines = EngineOptions(
        variants=(Backend.TENSORRT_RTX,),
        attention_impl=impl,
        profiles=profiles_from_options(half.manifest.max_len, profiles="100,300", batch="1:3:8"),
        architectures=("sm86",),
    )
    manifest = rebuild(RebuildOptions(bundle=half.path, output=tmp_path / "rebuilt", engines=engines))
    (engine,) = manifest.engines
    assert {profile.memory for profile in engine.profiles} == {(1, MOST, MOST)}
    assert (tmp_path / "rebuilt" / engine.file).stat().st_size > 10_000


def test_manifest_and_inspect_say_what_a_document_may_have(tiny_bundles, both_sides) -> None:
    manifest = both_sides.manifest
    assert manifest.document_tokens == manifest.max_len
    assert [spec.name for spec in manifest.recurrent_states] == ["mems.0", "mems.1", "mems.mask", "mems.position"]
    assert (manifest.max_memory, manifest.min_memory) == (MOST, 1)
    assert tiny_bundles("roberta").manifest.document_tokens is None
    shown = " ".join(run_here("inspect", both_sides.path).stdout.split())
    assert "recurrent state last 48 tokens of earlier segments; missing tokens are masked" in shown
    assert "at most 300 tokens per document, over all segments" in shown


def test_a_memory_beyond_the_reach_of_windows_is_warned_of(both_sides, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = find_checkpoint(both_sides.checkpoint)
    context = ConversionContext(
        model=checkpoint.load(Task.FEATURE_EXTRACTION),
        family=checkpoint.family,
        task=Task.FEATURE_EXTRACTION,
        max_len=64,
        recurrence=MOST,
    )
    for spec, warning in ((BOTH_SIDES, "Windows reach 16 tokens back, and 48 are cached: recurrence=16"), (ACROSS, "")):
        caplog.clear()
        attention_conversions(attention_from_spec(spec.replace("12,", "16,")), context)
        assert warning in caplog.text
        assert bool(warning) == bool(caplog.text)


def test_what_cannot_be_carried_is_refused(tmp_path: Path) -> None:
    for model_type, task in (
        ("bert", "feature-extraction"),
        ("bert", "text-classification"),
        ("modernbert", None),
        ("esm", None),
    ):
        save_tiny_model(tmp_path / f"{model_type} {task}", model_type, Task(task or "feature-extraction"))
    before = sorted(tmp_path.iterdir())
    for model, spec, options, message in (
        (
            "bert feature-extraction",
            None,
            {},
            r"48 does not fit this bert: its attention has no recurrent state.*\n.* attention='win",
        ),
        (
            "modernbert None",
            None,
            {},
            r"does not fit this modernbert: its attention has no recurrent state.*\nLeave it out\.$",
        ),
        (
            "esm None",
            "window:16,global:0",
            {},
            r"does not fit this esm, which rotates keys .*\nLeave it out: .*max_len",
        ),
        ("bert feature-extraction", "lsh", {}, r"does not fit this bert: its attention has no recurrent state"),
        ("bert feature-extraction", "window:16", {}, r"does not fit 1 global .*\n.*window:16,right:16,global:0'$"),
        ("bert text-classification", CAUSAL, {}, r"does not fit text-classification.*\n.*feature-extraction"),
        (
            "bert feature-extraction",
            CAUSAL,
            {"scheme": Scheme.INTERPOLATE},
            r"does not fit scheme interpolate .*\n.*hierarchical",
        ),
        (
            "bert feature-extraction",
            "window:64,global:0",
            {"attention_scale": "logn"},
            r"does not fit attention_scale='logn'.*\nUse attention_scale='none'\.$",
        ),
    ):
        path, attention = tmp_path / model, attention_from_spec(spec)
        asked = BuildOptions(
            model=path, output=tmp_path / "bundle", max_len=100, attention=attention, recurrence=MOST, **options
        )
        with named_case(message), pytest.raises(InputError, match=message):
            build(asked)
        assert sorted(tmp_path.iterdir()) == before


def test_a_document_that_goes_on_behind_its_last_position_is_refused(half) -> None:
    """Also where a caller hands over the memories: a table that is read past its end may answer anything."""
    session = half.session
    answers = session(input_ids=np.full((2, 260), 7))
    carried = {spec.name: answers[str(spec.fed_from)] for spec in half.manifest.recurrent_states}
    session(input_ids=np.full((2, 40), 7), **carried)
    # Padding needs no position.
    session(input_ids=np.full((2, 41), 7), attention_mask=np.arange(82).reshape(2, 41) % 41 < 40, **carried)
    with pytest.raises(InputError, match=r"Row 0 has 41 tokens after 260 of earlier calls .* at most 300\.\nLeave out"):
        session(input_ids=np.full((2, 41), 7), **carried)
    with pytest.raises(InputError, match=r"after -1 of earlier calls"):
        session(input_ids=np.full((2, 41), 7), **carried | {"mems.position": np.full((2, 1), -1.0, np.float32)})
