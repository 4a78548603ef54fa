"""OpenVINO on the CPU: the answers of ONNX Runtime in float32, whatever came before, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.backends import choice, entry
from hdruntime.backends.entry import LoadOptions
from hdruntime.backends.openvino import OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING, backend, devices, runner
from hdruntime.backends.openvino.devices import OpenVinoDevice
from hdruntime.backends.openvino.runner import OpenVinoRunner
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import (
    BackendError,
    BackendUnavailableError,
    BundleCorruptError,
    MissingDependencyError,
    OutOfMemoryError,
)
from hdruntime.session import Session
from support.comparators import assert_close, named_case
from support.needs import needs_openvino, openvino_computes_bfloat16
from support.resident_pages import resident_bytes_of

pytestmark = needs_openvino

HIDDEN = "last_hidden_state"
MAX_LEN = 300
FLOAT32_ATOL = 2e-5
"""Measured: 3.8e-6, of values up to 3.5."""


@pytest.fixture(scope="session")
def bundle(openvino_bundles: Callable[..., Any]) -> Bundle:
    """A BERT of two layers, with both graphs for OpenVINO."""
    return open_bundle(openvino_bundles("bert").path)


@pytest.fixture(scope="session")
def half_bundle(bundle: Bundle) -> Bundle:
    """Says that it was built with --bf16, which graphs for OpenVINO do not depend on."""
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, dtype="bfloat16"))


@pytest.fixture(scope="module")
def session(bundle: Bundle) -> Iterator[Session]:
    with hdruntime.load(bundle, "openvino", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(bundle: Bundle) -> Iterator[Session]:
    """ONNX Runtime, which is compared with PyTorch elsewhere."""
    with hdruntime.load(bundle, "onnxruntime", threads=1) as opened:
        yield opened


def ids_of(rows: int, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 90, (rows, tokens))


def mask_of(padding: str, rows: int, tokens: int) -> np.ndarray:
    """int64 [rows, tokens]; the first row of several has none of it."""
    mask = np.ones((rows, tokens), np.int64)
    padded = mask[1:] if rows > 1 else mask
    if padding == "right":
        padded[:, (tokens + 1) // 2 :] = 0
    elif padding == "left":
        padded[:, : tokens // 2] = 0
    elif padding == "holes":
        padded[:, 1::2] = 0
    elif padding == "all":
        padded[:] = 0
    return mask


def test_every_length_and_mask_is_as_in_onnx_runtime(session: Session, reference: Session) -> None:
    for padding in ["none", "right", "left", "holes", "all"]:
        for rows, tokens in itertools.product((1, 3), (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, MAX_LEN)):
            with named_case(rows, tokens):
                feeds = {"input_ids": ids_of(rows, tokens, tokens), "attention_mask": mask_of(padding, rows, tokens)}
                got, expected = session(**feeds)[HIDDEN], reference(**feeds)[HIDDEN]
                assert got.dtype == np.float32
                real = feeds["attention_mask"] == 1
                assert not got[~real].any()
                if real.any():
                    assert_close(got[real], expected[real], atol=FLOAT32_ATOL)


def test_a_text_of_one_token_changes_no_later_answer(session: Session, reference: Session) -> None:
    """OpenVINO 2026.4.1 goes on with the kernel for one token, where attention has no mask."""
    for tokens in (1, 16, 64, 1, MAX_LEN):
        ids = ids_of(2, tokens)
        assert_close(session(input_ids=ids)[HIDDEN], reference(input_ids=ids)[HIDDEN], atol=FLOAT32_ATOL)


def test_only_a_batch_with_padding_inside_or_of_one_token_needs_the_graph_with_masks(bundle: Bundle) -> None:
    for mask, is_needed in (
        (np.ones((2, 5), np.int64), False),
        (mask_of("right", 2, 5), False),
        (mask_of("left", 2, 5), True),
        (np.ones((2, 1), np.int64), True),
    ):
        opened = OpenVinoRunner(bundle, threads=1)
        with Session(bundle, opened) as session:
            session(input_ids=ids_of(*mask.shape), attention_mask=mask)
            assert (opened._padded._request is not None) == is_needed


def test_a_graph_that_is_read_again_is_the_one_that_was_loaded(bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    opened = OpenVinoRunner(open_bundle(copy), threads=1)
    with Session(open_bundle(copy), opened) as session:
        whole = session(input_ids=ids_of(1, 5))[HIDDEN]
        opened._unpadded._request = None  # as after a failed run
        np.testing.assert_array_equal(session(input_ids=ids_of(1, 5))[HIDDEN], whole)
        opened._unpadded._request = None
        os.utime(copy / "model.onnx.data", ns=(0, 0))
        with pytest.raises(BackendError, match=r"have changed since .* openvino_unpadded.*\n.*Load the bundle"):
            session(input_ids=ids_of(2, 5))


def test_several_threads_get_their_own_answers(session: Session, reference: Session) -> None:
    batches = [ids_of(1 + number % 3, 1 + 7 * number % 60, number) for number in range(24)]
    expected = [reference(input_ids=ids)[HIDDEN] for ids in batches]

    def call(number: int) -> None:
        got = session(input_ids=batches[number % 24])[HIDDEN]
        assert_close(got, expected[number % 24], atol=FLOAT32_ATOL)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(120)))


def test_results_stay_when_the_next_batch_has_run(session: Session) -> None:
    first = session(input_ids=ids_of(1, 20))[HIDDEN]
    copy = first.copy()
    session(input_ids=ids_of(1, 20, seed=1))
    np.testing.assert_array_equal(first, copy)
    assert first.flags.writeable


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's mappings")
def test_no_page_of_the_weights_stays_after_loading_and_a_larger_batch_than_before(bundle: Bundle) -> None:
    """OpenVINO maps the file, and goes on with copies in a layout of its own."""
    weights = bundle.path / "model.onnx.data"
    with hdruntime.load(bundle, "openvino", threads=1) as session:
        assert resident_bytes_of(weights) == 0
        first = session(input_ids=ids_of(1, 60))[HIDDEN]
        assert resident_bytes_of(weights) == 0
        # Later batches read the rows of their embeddings from the file again.
        np.testing.assert_array_equal(session(input_ids=ids_of(1, 60))[HIDDEN], first)
        assert resident_bytes_of(weights) > 0
        # Larger batches give back what they freed.
        session(input_ids=ids_of(1, 61))
        assert resident_bytes_of(weights) == 0


def test_closing_raises_in_threads_and_frees_the_graph(bundle: Bundle) -> None:
    opened = OpenVinoRunner(bundle, threads=1)
    session = Session(bundle, opened)

    def use() -> bool:
        try:
            while True:
                session(input_ids=ids_of(2, 30))
        except BackendError as error:
            return "session is closed" in str(error)

    with ThreadPoolExecutor(3) as pool:
        users = [pool.submit(use) for _ in range(3)]
        while session.padding.tokens < 600:
            pass
        session.close()
        assert all(user.result(timeout=30) for user in users)
    assert opened._unpadded._request is None
    session.close()
    with pytest.raises(BackendError, match="OpenVINO session is closed; load the bundle again"):
        opened.start({"input_ids": ids_of(1, 4), "attention_mask": np.ones((1, 4), np.int64)}, [HIDDEN])()


# Precision


def cosine_per_token(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
    return (got * expected).sum(-1) / lengths


@openvino_computes_bfloat16
def test_bfloat16_is_close_and_not_float32(bundle: Bundle, reference: Session) -> None:
    with hdruntime.load(bundle, "openvino", threads=1, precision="bfloat16") as session:
        assert session.precision is hdruntime.Precision.BFLOAT16
        for tokens in (1, 17, 130):
            for padding in ("none", "left"):
                feeds = {"input_ids": ids_of(3, tokens), "attention_mask": mask_of(padding, 3, tokens)}
                got, expected = session(**feeds)[HIDDEN], reference(**feeds)[HIDDEN]
                real = feeds["attention_mask"] == 1
                assert cosine_per_token(got[real], expected[real]).min() > 0.999
                assert np.abs(got - expected).max() > 10 * FLOAT32_ATOL


@openvino_computes_bfloat16
def test_auto_is_bfloat16_for_bundles_of_half_precision(bundle: Bundle, half_bundle: Bundle) -> None:
    with hdruntime.load(half_bundle, "openvino", threads=1) as session:
        assert session.precision is hdruntime.Precision.BFLOAT16
    for float32 in (
        hdruntime.load(bundle, "openvino", threads=1),
        hdruntime.load(half_bundle, "openvino", threads=1, precision="float32"),
        hdruntime.load(half_bundle, "onnxruntime", threads=1),
    ):
        with float32 as session:
            assert session.precision is hdruntime.Precision.FLOAT32


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bfloat16, as OpenVINO describes one; no variable of the environment makes it one."""
    plain = OpenVinoDevice(name="CPU", model="Old CPU", capabilities=("FP32", "INT8"))
    monkeypatch.setattr(runner, "chosen_device", lambda core, name: plain)


@pytest.mark.usefixtures("plain_cpu")
def test_a_cpu_without_bfloat16_refuses_it_and_computes_in_float32(half_bundle: Bundle) -> None:
    with pytest.raises(
        BackendUnavailableError,
        match=r"Old CPU \(CPU\) does not compute in bfloat16; OpenVINO says that it has FP32, INT8.\n.*auto",
    ):
        hdruntime.load(half_bundle, precision="bfloat16")
    with hdruntime.load(half_bundle, "openvino", threads=1) as session:
        assert session.precision is hdruntime.Precision.FLOAT32


def test_a_precision_without_its_graph_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BackendUnavailableError, match=r"no graph for OpenVINO in int8.\nBuild it again with int8"):
        hdruntime.load(bundle, "openvino", precision="int8")
    with pytest.raises(BackendUnavailableError, match=r"no graph in int8 that ONNX Runtime .*\n.*with int8"):
        hdruntime.load(bundle, "onnxruntime", precision="int8")
    with pytest.raises(BackendUnavailableError, match=r"bfloat16 only on Linux on aarch64.*\n.*openvino"):
        hdruntime.load(bundle, "onnxruntime", precision="bfloat16")
    with pytest.raises(hdruntime.InputError, match="precision is 'fp8'; it must be one of 'auto', 'float32'"):
        hdruntime.load(bundle, "openvino", precision="fp8")


def test_the_graph_in_int8_is_the_one_of_that_dtype(bundle: Bundle, tmp_path: Path) -> None:
    """It is the other graph under that name here; what it holds is tested where it is made."""
    other = relisted(bundle, tmp_path, lambda graph: dataclasses.replace(graph, dtype="int8"))
    with hdruntime.load(other, "openvino", threads=1, precision="int8") as session:
        assert session.precision is hdruntime.Precision.INT8
        assert session(input_ids=ids_of(1, 5))[HIDDEN].shape[:2] == (1, 5)


# The choice


def chosen_on_cpu(bundle: Bundle, precision: hdruntime.Precision = hdruntime.Precision.AUTO) -> tuple[str, str]:
    """The choice of ``auto`` on the CPU, and why."""
    takes, why = backend.OpenVinoBackend().preference(bundle, LoadOptions(precision=precision))
    return "openvino" if takes else "onnxruntime", why


def attending(bundle: Bundle, operator: str = "SlidingWindowAttention") -> Bundle:
    """Says that its attention is windowed, with which OpenVINO is the faster one in float32, too, or another."""
    operators = {f"hdexport::{operator}": 2}
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, operators=operators))


def has_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> None:
    """This processor is another one, as Linux tells."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: of a test\nflags\t\t: fpu {flags} rdpid\nbugs\t\t: none\n\n")
    monkeypatch.setattr(backend, "_CPUINFO", cpuinfo)


@pytest.mark.parametrize(
    ("flags", "in_int8", "of_half"),
    [
        ("avx2 fma", "onnxruntime", "onnxruntime"),
        ("avx2 avx_vnni", "openvino", "onnxruntime"),
        ("avx512f avx512_vnni amx_bf16 amx_int8", "openvino", "openvino"),
        ("avx_vnni avx_vnni_int8 avx_ne_convert", "openvino", "openvino"),
    ],
)
def test_auto_goes_by_what_the_processor_multiplies(
    half_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, in_int8: str, of_half: str
) -> None:
    """int8 without VNNI and half precision that runs in float32 are faster in ONNX Runtime; windows in float32 not."""
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    has_flags(monkeypatch, tmp_path, flags)
    rounded = relisted(half_bundle, tmp_path, lambda graph: dataclasses.replace(graph, dtype="int8"))
    assert chosen_on_cpu(rounded, hdruntime.Precision.INT8)[0] == in_int8
    assert chosen_on_cpu(attending(rounded), hdruntime.Precision.INT8)[0] == in_int8
    assert chosen_on_cpu(half_bundle)[0] == of_half
    assert chosen_on_cpu(attending(half_bundle))[0] == "openvino"


def test_auto_takes_openvino_on_the_cpu_where_the_bundle_has_its_graph(
    bundle: Bundle, half_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    has_flags(monkeypatch, tmp_path, "avx2 avx512_bf16 avx512_vnni")
    found = ("openvino", "OpenVINO is installed, and the bundle has a graph for it.")
    assert chosen_on_cpu(half_bundle) == chosen_on_cpu(attending(bundle)) == found
    of_dense = ("onnxruntime", "OpenVINO was not measured to be faster in float32 with DenseAttention.")
    assert chosen_on_cpu(bundle) == of_dense
    assert chosen_on_cpu(half_bundle, hdruntime.Precision.FLOAT32) == of_dense
    of_none = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, operators={}))
    without = ("onnxruntime", "OpenVINO was not measured to be faster in float32 with standard operators.")
    assert chosen_on_cpu(of_none) == without
    for operator in ("BlockSparseAttention", "ChunkAttention"):
        assert chosen_on_cpu(attending(half_bundle, operator)) == found
        assert chosen_on_cpu(attending(bundle, operator))[0] == "onnxruntime"
    with hdruntime.load(attending(bundle), precision="float32", threads=1) as session:
        assert (session.backend, session.backend_reason) == (
            hdruntime.Backend.OPENVINO,
            "The precision float32 is for CPUs. OpenVINO is installed, and the bundle has a graph for it.",
        )
    monkeypatch.setattr(backend.platform, "machine", lambda: "AMD64")
    of_hashes = ("onnxruntime", "OpenVINO was not measured to be faster with LSHAttention.")
    assert chosen_on_cpu(attending(bundle, "LSHAttention")) == of_hashes
    monkeypatch.setattr(backend.platform, "machine", lambda: "riscv64")
    elsewhere = ("onnxruntime", "OpenVINO was not compared with ONNX Runtime on riscv64.")
    assert chosen_on_cpu(bundle) == elsewhere


def test_a_graph_that_openvino_does_not_load_leaves_auto_onnx_runtime(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BackendError("no such operator")

    monkeypatch.setattr("hdruntime.backends.openvino.runner.OpenVinoRunner", fail)
    with hdruntime.load(attending(bundle), precision="float32", threads=1) as session:
        assert session.backend is hdruntime.Backend.ONNXRUNTIME
        assert session.backend_reason.endswith("OpenVINO does not load the bundle's graph.")
    assert "backend auto: openvino should run here and does not: no such operator" in caplog.text
    with pytest.raises(BackendError, match="no such operator"):
        hdruntime.load(bundle, "openvino")


def test_links_inside_the_bundle_are_followed(bundle: Bundle, tmp_path: Path) -> None:
    """A graph and the weights, under other names in another folder of the bundle."""
    copy = Path(shutil.copytree(bundle.path, tmp_path / "linked"))
    (copy / "files").mkdir()
    for name in ("openvino.onnx", "openvino_unpadded.onnx", "model.onnx.data"):
        (copy / name).rename(copy / "files" / f"of-{name}")
        (copy / name).symlink_to(Path("files") / f"of-{name}")
    ids = np.arange(5, 12)[None]
    found = []
    for path in (bundle.path, copy):
        with hdruntime.load(path, "openvino", threads=1) as session:
            found.append(session(input_ids=ids))
    for name, values in found[0].items():
        np.testing.assert_array_equal(found[1][name], values)


def test_a_bundle_without_the_graph_is_refused_with_the_command(bundle_path: Path) -> None:
    with pytest.raises(
        BackendUnavailableError, match=r"no graph for OpenVINO.\nAdd it: hdexport rebuild .* --target openvino"
    ):
        hdruntime.load(bundle_path, "openvino")
    assert "no graph for OpenVINO" in str(
        choice.unavailable_reason(open_bundle(bundle_path), hdruntime.Backend.OPENVINO)
    )


def test_without_openvino_the_install_command_is_said(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "is_installed", lambda package: False)
    with pytest.raises(MissingDependencyError, match=r"not installed\.\n.*pip install 'hdexport\[openvino\]'"):
        hdruntime.load(bundle, "openvino")
    with hdruntime.load(bundle, precision="float32", threads=1) as session:
        assert session.backend is hdruntime.Backend.ONNXRUNTIME
        assert session.backend_reason.endswith("OpenVINO is not installed.")


def test_a_device_that_is_not_there_is_refused_with_those_that_are(bundle: Bundle) -> None:
    for name in ("auto", "openvino"):
        with pytest.raises(BackendUnavailableError, match=r"no device 'GPU.7' here; it has .*CPU"):
            hdruntime.load(bundle, name, device="GPU.7")
    with pytest.raises(BackendUnavailableError, match=r"onnxruntime does not take the device 'GPU'"):
        hdruntime.load(bundle, "onnxruntime", device="GPU")
    with hdruntime.load(bundle, device="CPU", threads=1) as session:
        assert (session.backend, session.backend_reason) == ("openvino", "No other backend has the device CPU.")


def test_a_family_of_devices_and_each_of_them_are_found() -> None:
    class Core:
        available_devices = ("CPU", "GPU.0", "GPU.1")

        def get_property(self, name: str, key: str) -> object:
            return {"FULL_DEVICE_NAME": f"Intel {name} ", "OPTIMIZATION_CAPABILITIES": ["FP32", "FP16"]}[key]

    for name in ("GPU", "GPU.1", "CPU"):
        assert devices.chosen_device(Core(), name).model == f"Intel {name}"


# Faults


def relisted(bundle: Bundle, tmp_path: Path, also: Callable[[GraphFile], GraphFile]) -> Bundle:
    """A copy of the bundle that lists its graphs for OpenVINO a second time, changed."""
    directory = tmp_path / "relisted"
    directory.mkdir()
    for name in bundle.manifest.files:
        os.link(bundle.path / name, directory / name)
    lowerings = (OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING)
    second = tuple(also(graph) for graph in bundle.manifest.graphs if graph.lowering in lowerings)
    seal(directory, dataclasses.replace(bundle.manifest, graphs=(*bundle.manifest.graphs, *second)))
    return open_bundle(directory)


def test_a_graph_with_another_interface_is_refused(bundle: Bundle) -> None:
    outputs = tuple(dataclasses.replace(spec, name="logits") for spec in bundle.manifest.outputs)
    other = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, outputs=outputs))
    with pytest.raises(BundleCorruptError, match=r"The outputs of openvino.onnx are .*lists logits"):
        OpenVinoRunner(other)


def test_a_graph_that_is_no_graph_is_an_error_of_ours(bundle: Bundle, tmp_path: Path) -> None:
    other = relisted(bundle, tmp_path, lambda graph: dataclasses.replace(graph, dtype="int8"))
    (other.path / "openvino_unpadded.onnx").unlink()
    (other.path / "openvino_unpadded.onnx").write_bytes(b"not a graph")
    with pytest.raises(BackendError, match=r"OpenVINO .* cannot load .*openvino_unpadded.onnx on CPU: "):
        OpenVinoRunner(other)


def test_weights_behind_a_link_as_in_the_hubs_cache_have_a_remedy_that_works(bundle: Bundle, tmp_path: Path) -> None:
    model, copy = tmp_path / "a model", tmp_path / "copy"
    linked, blobs = model / "snapshots" / "commit", model / "blobs"
    shutil.copytree(bundle.path, linked)
    blobs.mkdir()
    for weights in linked.glob("*.data"):
        weights.replace(blobs / weights.name)
        weights.symlink_to(blobs / weights.name)
    with pytest.raises(BackendError, match=r"reads no weights behind a link(.|\n)*cp -rL '.*' BUNDLE$") as refused:
        OpenVinoRunner(open_bundle(linked))
    command = str(refused.value).partition("or cp ")[2].removesuffix("BUNDLE")
    subprocess.run(["sh", "-c", f"cp {command} {copy}"], check=True)
    OpenVinoRunner(open_bundle(copy)).close()


def test_a_batch_without_memory_is_said_to_be_one(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenVinoRunner(bundle, threads=1)

    class NoMemory:
        def start_async(self, *_: object, **__: object) -> None:
            raise RuntimeError("Exception from src/inference/src/infer.cpp:1:\nstd::bad_alloc\n")

    for rows, advice in ((1, "split the text"), (2, "lower batch_tokens")):
        monkeypatch.setattr(opened._unpadded, "_request", NoMemory())
        feeds = {"input_ids": ids_of(rows, 5), "attention_mask": np.ones((rows, 5), np.int64)}
        said = rf"no memory for a batch of {rows} x 5 tokens: std::bad_alloc\n.*{advice}"
        with pytest.raises(OutOfMemoryError, match=said):
            opened.run(feeds, [HIDDEN])


# A process of its own

_MEMORY = """
import sys, hdruntime, numpy as np

def resident_mib():
    with open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) // 1024

numbers = np.random.default_rng(0)
session = hdruntime.load(sys.argv[1], "openvino", threads=1)
def run(rows, tokens):
    session(input_ids=numbers.integers(5, 90, (rows, tokens)))
def run_random(calls):
    for _ in range(calls):
        run(1, int(numbers.integers(2, 301)))
run(1, 300)
found = [resident_mib()]
for step in sys.argv[2:]:
    eval(step)
    found.append(resident_mib())
print(*found)
"""


def resident(bundle: Bundle, *steps: str) -> list[int]:
    """MiB after the first call, and after each step."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, bundle.path, *steps], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [int(number) for number in done.stdout.split()]


@pytest.mark.nightly
def test_memory_stays_over_calls_of_random_lengths(bundle: Bundle) -> None:
    """Measured: it grows by 145 MiB, the kernels of 300 lengths, then by 5; by 200 with the kernels OpenVINO keeps."""
    start, warm, end = resident(bundle, "run_random(1000)", "run_random(500)")
    assert warm - start < 172, f"{start} MiB became {warm}"
    assert end - warm < 15, f"{warm} MiB became {end}"


def test_a_large_batch_gives_its_memory_back(bundle: Bundle) -> None:
    before, after = resident(bundle, "run(400, 300)")
    assert after < 1.5 * before, f"{before} MiB became {after}"


_OUT_OF_MEMORY = """
import resource, sys, numpy as np
from hdruntime.backends.openvino.runner import OpenVinoRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import OutOfMemoryError

runner = OpenVinoRunner(open_bundle(sys.argv[1]), threads=int(sys.argv[2]))
def run(seed, rows):
    ids = np.random.default_rng(seed).integers(5, 90, (400, 300))[:rows]
    feeds = {spec.name: np.zeros_like(ids) for spec in runner.manifest.inputs}
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return runner.run({**feeds, **given}, ["last_hidden_state"])

expected = [run(seed, 2)["last_hidden_state"] for seed in (0, 1)]
with open("/proc/self/statm") as pages:
    used = int(pages.read().split()[0]) * resource.getpagesize()
for limit in (used + 2**24, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for seed in (0, 1):
        try:
            found = run(seed, 400)["last_hidden_state"]
            print(len(found) == 400 and np.abs(found[:2] - expected[seed]).max() < 2e-5)
        except OutOfMemoryError:
            print("no memory")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the memory of a process so")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("model_type", ["bert", "eurobert"])
def test_a_batch_without_memory_raises_and_is_right_when_there_is_some(
    openvino_bundles: Callable[..., Any], model_type: str, threads: int
) -> None:
    """With one thread, OpenVINO's `infer` (2026.4.1) raises nothing, and results may be those of the batch before."""
    command = [sys.executable, "-c", _OUT_OF_MEMORY, openvino_bundles(model_type).path, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["no memory", "no memory", "True", "True", ""]
