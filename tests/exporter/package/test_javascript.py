"""Packages in JavaScript, in Node and in a browser: Transformers.js with texts, ONNX Runtime with ids of tokens.

What they answer is compared with what the bundle answers. `make test-all` installs the libraries; Chromium is the
system's.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import runpy
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdexport.checkpoint import default_model
from hdexport.package.check import COSINES, sample_texts
from hdexport.package.write import PackageOptions, package_bundle
from hdruntime.bundle.reader import open_bundle
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.of_bundle import task_of_bundle
from hdruntime.tasks.task import Text
from hdruntime.tasks.text_inference import answers_of
from support.commands import run_here
from support.comparators import assert_same_directions
from support.pages import ROOT

PROGRAMS = Path(__file__).parent / "javascript"
PLACES = ("node", "browser")
DTYPES: Mapping[str, Any] = {"fp32": "float32", "fp16": "float16", "q8": "int8"}
"""Names of Transformers.js -> ours."""
TEXTS = [text for _, text in sample_texts()]
MAX_LEN = 640
QUESTION = "who grinds wheat"
INPUTS: Mapping[str, list[Any]] = {
    "text-classification": TEXTS[:3],
    "token-classification": TEXTS[:3],
    "fill-mask": ["the [MASK] flows past an old mill", f"{TEXTS[1]} and a [MASK] sleeps", f"[MASK] {TEXTS[2]}"],
    "question-answering": [[QUESTION, text] for text in TEXTS[1:3]],
}
"""Task -> what its pipeline takes."""


Bundles = Callable[[str], Path]
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def bundle_for(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """A bundle of the sample model with a head for a task; its weights are random, and large enough to decide."""

    @functools.cache
    def build(task: str) -> Path:
        import torch
        import transformers

        heads: dict[str, Any] = {
            "text-classification": transformers.AutoModelForSequenceClassification,
            "token-classification": transformers.AutoModelForTokenClassification,
            "fill-mask": transformers.AutoModelForMaskedLM,
            "question-answering": transformers.AutoModelForQuestionAnswering,
        }
        folder, sample = tmp_path_factory.mktemp(task), default_model()[0]
        torch.manual_seed(1)
        labels = {"num_labels": 4} if "classification" in task else {}
        model = heads[task].from_pretrained(sample, **labels)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in ("classifier.weight", "qa_outputs.weight"):
                    weight *= 10
        model.save_pretrained(folder / "checkpoint")
        transformers.AutoTokenizer.from_pretrained(sample).save_pretrained(folder / "checkpoint")
        options = ("--task", task, "--max-len", MAX_LEN, "--fp16", "--target", "onnx", "--verify", "none")
        done = run_here("build", folder / "checkpoint", *options, "-o", folder / "bundle")
        assert done.returncode == 0, done.stderr
        return folder / "bundle"

    return build


@pytest.fixture(scope="module")
def package_for(bundle_for: Bundles, embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """The bundle of a task, or the embedder's, as Transformers.js loads it, with a file for each dtype."""

    @functools.cache
    def package(task: str) -> Path:
        bundle = embedder if task == "feature-extraction" else bundle_for(task)
        options = PackageOptions(
            target="transformers.js", output=tmp_path_factory.mktemp(task) / "package", check=False
        )
        return package_bundle(open_bundle(bundle), options).path

    return package


class _Files(http.server.SimpleHTTPRequestHandler):
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs and their libraries, in which a test puts a package."""
    modules = ROOT / ".venv" / "readers" / "js" / "node_modules"
    if not modules.is_dir() or shutil.which("node") is None:
        pytest.skip(f"{modules} is made by make test-all, which needs node")
    for program in PROGRAMS.iterdir():
        shutil.copyfile(program, tmp_path / program.name)
    (tmp_path / "node_modules").symlink_to(modules)
    return tmp_path


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """A server of the folder's files."""
    handler = functools.partial(_Files, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def asked(folder: Path, address: str) -> Ask:
    """Asks the programs for their answers to inputs: ``asked("node", inputs=[...], ...)``."""

    def ask(place: str, **request: Any) -> Any:
        return _ask_node(folder, request) if place == "node" else _ask_browser(folder, address, request)

    return ask


def _ask_node(folder: Path, request: Mapping[str, Any]) -> Any:
    done = subprocess.run(
        ["node", "node.mjs"], input=json.dumps(request), cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _ask_browser(folder: Path, address: str, request: Mapping[str, Any]) -> Any:
    (folder / "request.json").write_text(json.dumps(request))
    with opened(f"{address}/page.html") as page:
        page.wait_for_function("window.found || window.failure", timeout=600_000)
        failure, found = page.evaluate("[window.failure, window.found]")
    assert failure is None, failure
    return found


@contextlib.contextmanager
def opened(address: str) -> Iterator[Any]:
    """A page in Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        yield page
        browser.close()


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_transformers_js_embeds_as_the_bundle(
    place: str, package_for: Bundles, embeddings: np.ndarray, folder: Path, asked: Ask
) -> None:
    (folder / "package").symlink_to(package_for("feature-extraction"))
    for name, dtype in DTYPES.items():
        texts = TEXTS if name == "fp32" else TEXTS[:3]
        found = asked(place, task="feature-extraction", dtype=name, inputs=texts)
        assert_same_directions(np.array(found), embeddings[: len(texts)], cosine=COSINES[dtype])


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_transformers_js_finds_the_only_graph_and_weights_outside(
    place: str, embedder: Path, embeddings: np.ndarray, folder: Path, asked: Ask
) -> None:
    """Without a dtype in the call it loads what the package has; the default in WebAssembly would be q8."""
    options: dict[str, Any] = {"dtype": "float16", "single_file": False, "check": False}
    package_bundle(
        open_bundle(embedder), PackageOptions(target="transformers.js", output=folder / "package", **options)
    )
    assert (folder / "package" / "onnx" / "model_fp16.onnx").stat().st_size < 1_000_000
    found = asked(place, task="feature-extraction", inputs=TEXTS[:3])
    assert_same_directions(np.array(found), embeddings[:3], cosine=COSINES["float16"])


@pytest.mark.nightly
def test_the_page_of_the_examples_embeds_a_text_of_3000_tokens(embedder: Path, folder: Path, address: str) -> None:
    runpy.run_path(str(ROOT / "examples" / "browser.py"))["make_page"](embedder, folder, tokens=3000)
    with opened(f"{address}/index.html") as page:
        for row, (dtype, least) in enumerate((("fp32", COSINES["float32"]), ("q8", COSINES["int8"])), 1):
            page.select_option("#dtype", dtype)
            page.click("#embed:enabled")
            page.wait_for_function(f"document.querySelector('#results').rows.length > {row}", timeout=600_000)
            cells = page.locator(f"#results tr:nth-child({row + 1}) td").all_inner_texts()
            assert cells[:3] == [dtype, "3000", "384"]
            assert float(cells[4]) > least
            assert page.inner_text("#state") == ""


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("place", PLACES)
def test_onnxruntime_computes_the_bundles_embeddings_from_bytes(
    place: str, dtype: Any, embedder: Path, embeddings: np.ndarray, folder: Path, asked: Ask
) -> None:
    """onnxruntime-node, and onnxruntime-web in WebAssembly, with ids of the bundle's tokenizer."""
    package_bundle(
        open_bundle(embedder), PackageOptions(target="onnx", output=folder / "package", dtype=dtype, check=False)
    )
    texts = TEXTS if dtype == "int8" else TEXTS[:3]
    with hdruntime.load(embedder, "onnxruntime") as session:
        ids = [np.asarray(encoding.input_ids).tolist() for encoding in session.tokenize(texts)]
    found = asked(place, file="package/model.onnx", inputs=ids)
    assert_same_directions(np.array(found), embeddings[: len(texts)], cosine=COSINES[dtype])


Answer = Mapping[str, float]
"""What is answered -> its score: labels, labels of tokens, tokens for a mask, or the words of an answer."""


@dataclass(frozen=True)
class Limits:
    """How far an answer may be from the bundle's.

    Attributes:
        shared: least part of the bundle's labels, tokens or words that are answered.
        error: largest mean error of their scores.
    """

    shared: float
    error: float


LIMITS: Mapping[str, Limits] = {"fp32": Limits(1, 1e-5), "fp16": Limits(1, 1e-3), "q8": Limits(0.5, 0.05)}
"""Measured: fp32 1.2e-6, fp16 3.9e-4; q8 gives 94 % of the tokens' labels, mean error 0.03 (Node 20 and Chromium 156,
2026-11-29). The bundle's 5 best tokens for a mask are looked for among the library's 50 best: scores of a random head
are nearly equal."""


def assert_answers(found: list[Answer], expected: list[Answer], limits: Limits) -> None:
    for answer, wanted in zip(found, expected, strict=True):
        shared = answer.keys() & wanted.keys()
        assert len(shared) >= limits.shared * len(wanted), (answer, wanted)
        assert np.mean([abs(answer[name] - wanted[name]) for name in shared]) <= limits.error, (answer, wanted)


def answers_of_bundle(task: str, path: Path) -> list[Answer]:
    bundle = open_bundle(path)
    text_task, inputs = task_of_bundle(bundle), INPUTS[task]
    with hdruntime.load(bundle, "onnxruntime") as session:
        if task == "question-answering":
            # The library has no limit of an answer's length.
            found = session.answers(*zip(*inputs, strict=True), max_answer_tokens=MAX_LEN)
            return [dict.fromkeys(best.answer.split(), best.score) for (best,) in found]
        answers = answers_of(session, text_task, [Text(text=text) for text in inputs], EncodeOptions())
    rows = [text_task.values(answer) for answer in answers]
    if task == "text-classification":
        return [row["scores"] for row in rows]
    if task == "token-classification":
        return [{f"{i} {each['label']}": each["score"] for i, each in enumerate(row["entities"], 1)} for row in rows]
    return [{str(each["token_id"]): each["score"] for each in row["masks"][0]} for row in rows]


def answers_of_library(task: str, found: list[Any]) -> list[Answer]:
    if task == "question-answering":
        return [dict.fromkeys(best["answer"].split(), best["score"]) for best in found]
    if task == "text-classification":
        return [{each["label"]: each["score"] for each in row} for row in found]
    if task == "token-classification":
        return [{f"{each['index']} {each['entity']}": each["score"] for each in row} for row in found]
    return [{str(each["token"]): each["score"] for each in row} for row in found]


@pytest.mark.nightly
@pytest.mark.parametrize("task", INPUTS)
@pytest.mark.parametrize("place", PLACES)
def test_transformers_js_answers_as_the_bundle(
    place: str, task: str, bundle_for: Bundles, package_for: Bundles, folder: Path, asked: Ask
) -> None:
    (folder / "package").symlink_to(package_for(task))
    expected = answers_of_bundle(task, bundle_for(task))
    for dtype, limits in LIMITS.items():
        found = asked(place, task=task, dtype=dtype, inputs=INPUTS[task])
        assert_answers(answers_of_library(task, found), expected, limits)


def test_another_answer_is_found() -> None:
    right = [{"1 A": 0.5, "2 B": 0.9}]
    assert_answers(right, right, LIMITS["fp32"])
    for wrong in ({"1 A": 0.5, "2 C": 0.9}, {"1 A": 0.5}, {"1 A": 0.5, "2 B": 0.91}):
        with pytest.raises(AssertionError):
            assert_answers([wrong], right, LIMITS["fp16"])
    with pytest.raises(AssertionError):
        assert_answers([{"1 B": 0.5, "2 C": 0.9}], right, LIMITS["q8"])
