"""Builds that cannot fit are rejected before a weight is read, and what the message proposes does fit."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

import pytest
import torch
import transformers

from hdexport.build import BuildOptions, build
from hdexport.checkpoint.weight_sizes import WeightSizes
from hdexport.cli.flags import flag
from hdexport.pipeline.needed_space import check_space, min_bundle_bytes, min_memory
from hdexport.quantize import Int8Options
from hdexport.verify.grid import Grid
from hdruntime.errors import HdexportError, OutOfMemoryError
from support.forks import Fork
from support.full_disks import on_full_disks

VALUES = 10**9

HALF = WeightSizes(
    path=Path("model"),
    total=VALUES,
    of_layers=VALUES // 2,
    half=VALUES,
    can_stay={"bfloat16": VALUES},
    copied=0,
    keeps_half=True,
    is_mapped=True,
)
FLOAT32 = dataclasses.replace(HALF, half=0, can_stay={})
PICKLE = dataclasses.replace(FLOAT32, copied=VALUES, is_mapped=False)


def options(**changes: object) -> BuildOptions:
    return BuildOptions(model="model", output=Path("bundle"), max_len=8, **{"verify": None, **changes})


@pytest.mark.parametrize(
    ("sizes", "changes", "gigabytes", "said"),
    [
        (HALF, {"fp32_weights": True}, 4, "Without --fp32-weights it needs 0.0 MB. Use a machine with"),
        (HALF, {"precision": "float16"}, 2, "Without --fp16 it needs 0.0 MB. Use a machine with"),
        (FLOAT32, {"precision": "bfloat16"}, 2, "Without --bf16 it needs 0.0 MB. Use a machine with"),
        (PICKLE, {"precision": "bfloat16"}, 4, "Save the checkpoint as safetensors"),
        # An adapter is merged into float32 copies, whatever is asked for.
        (dataclasses.replace(HALF, keeps_half=False), {"adapter": "a"}, 4, "Use a machine with more than 4.0 GB"),
        (HALF, {}, 0, None),
        (HALF, {"precision": "bfloat16"}, 0, None),
        (FLOAT32, {}, 0, None),
    ],
)
def test_what_does_not_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch, sizes: WeightSizes, changes: dict, gigabytes: int, said: str | None
) -> None:
    asked = options(**changes)
    read = dataclasses.replace(sizes, keeps_half=sizes.keeps_half and not asked.fp32_weights)
    needed = gigabytes * 10**9
    assert min_memory(read, asked) == needed
    monkeypatch.setattr("hdexport.pipeline.needed_space.free_disk_bytes", lambda asked: 10**12)
    for free in (needed, None):
        monkeypatch.setattr("hdexport.pipeline.needed_space.free_bytes", lambda free=free: free)
        check_space(read, asked)
    if said is None:
        return
    monkeypatch.setattr("hdexport.pipeline.needed_space.free_bytes", lambda: needed - 10**8)
    with pytest.raises(OutOfMemoryError) as raised:
        check_space(read, asked)
    problem, hint = raised.value.message(flag).split("\n")
    assert problem == (
        f"The build needs at least {gigabytes}.0 GB of memory for copies of the weights of model, and "
        f"{gigabytes - 0.1:.1f} GB are free."
    )
    assert hint.startswith(said)


@pytest.mark.parametrize(
    ("sizes", "changes", "gigabytes", "said"),
    [
        (HALF, {"int8": Int8Options()}, 2.5, "Without --int8 it needs 2.0 GB. Free some space there, or choose"),
        (HALF, {"fp32_weights": True}, 4, "Without --fp32-weights it needs 2.0 GB. Free some space there"),
        (HALF, {}, 2, "Free some space there, or choose another place with -o."),
        (FLOAT32, {"precision": "float16"}, 2, "Free some space there"),
    ],
)
def test_what_does_not_fit_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, sizes: WeightSizes, changes: dict, gigabytes: float, said: str
) -> None:
    asked = options(**changes)
    read = dataclasses.replace(sizes, keeps_half=not asked.fp32_weights)
    needed = int(gigabytes * 10**9)
    assert min_bundle_bytes(read, asked) == needed
    monkeypatch.setattr("hdexport.pipeline.needed_space.free_bytes", lambda: 10**12)
    monkeypatch.setattr("hdexport.pipeline.needed_space.free_disk_bytes", lambda asked: needed)
    check_space(read, asked)
    monkeypatch.setattr("hdexport.pipeline.needed_space.free_disk_bytes", lambda asked: needed - 10**8)
    with pytest.raises(HdexportError, match="of disk space, and") as raised:
        check_space(read, asked)
    assert raised.value.message(flag).split("\n")[1].startswith(said)


def test_a_build_that_took_more_before_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hdexport.pipeline.needed_space.free_disk_bytes", lambda asked: 10**12)
    for free, verify, is_warned in ((1.1, Grid.QUICK, True), (1.2, Grid.QUICK, False), (1.1, None, False)):
        caplog.clear()
        monkeypatch.setattr("hdexport.pipeline.needed_space.free_bytes", lambda free=free: int(free * 1e9))
        check_space(HALF, options(verify=verify))
        assert bool(caplog.messages) == is_warned
        if is_warned:
            assert "0.9 GB of it for the comparison" in caplog.text
            assert "verify=None" in caplog.text


def test_a_small_disk_is_found_before_the_trace(tmp_path: Path, small_checkpoint: Path) -> None:
    done = on_full_disks(["build", small_checkpoint, "--max-len", "16", "--no-tokenizer", "--no-verify"], tmp_path)
    assert re.findall("rc: .*", done.stdout) == ["rc: 1 []"] * 2
    said = r"error: The bundle needs at least 0\.4 MB of disk space, and 0\.\d MB are free at .*\nFree some space"
    assert len(re.findall(said, done.stderr)) == 2, done.stderr


@pytest.fixture
def small_checkpoint(tmp_path: Path) -> Path:
    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def _peak_of_build(asked: BuildOptions) -> None:
    """Print by how many bytes memory that is not of files rises at most during a build."""
    import hdexport.checkpoint.loading
    import hdexport.graph.tracing  # noqa: F401

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    peak, ended, before = 0, threading.Event(), resident()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    build(asked)
    ended.set()
    thread.join()
    print("peak:", peak - before)


@pytest.mark.nightly
def test_a_build_that_is_rejected_fits_as_the_message_proposes(tmp_path: Path) -> None:
    """100 million parameters in bfloat16, 400 MB of float32 copies, and a tenth less that seems to be free."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30_000, hidden_size=1024, num_hidden_layers=5, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.BertModel(config).bfloat16()
    model.save_pretrained(tmp_path / "checkpoint")
    copies = 4 * sum(parameter.numel() for parameter in model.parameters())
    free = copies * 9 // 10
    done = Fork(_build_in, free, tmp_path).finished()
    assert done.returncode == 0, done.stderr
    rejected, proposed = done.stdout.splitlines()[-2:]
    assert rejected.startswith("rejected: Without --fp32-weights it needs ")
    assert int(proposed.removeprefix("peak: ")) < free


def _build_in(free: int, directory: Path) -> int:
    """Print the hint of a build that is rejected, and the peak of the build without its option."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hdexport.model.half_weights.MIN_MODEL_BYTES", 1)
        for module in ("pipeline.needed_space", "verify.float32_session"):
            patch.setattr(f"hdexport.{module}.free_bytes", lambda: free)
        asked = BuildOptions(
            model=directory / "checkpoint",
            output=directory / "bundle",
            max_len=64,
            tokenizer=None,
            verify=None,
            fp32_weights=True,
        )
        try:
            build(asked)
        except OutOfMemoryError as error:
            print("rejected:", error.message(flag).split("\n")[1])
        _peak_of_build(dataclasses.replace(asked, fp32_weights=False))
    return 0
