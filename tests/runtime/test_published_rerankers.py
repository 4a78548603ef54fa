"""Generators that score pairs, in the layouts that they are published in: the numbers of their publishers' code.

That code cuts the texts between the two ends of a template, and takes the logits of two tokens after the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import hdruntime
from hdruntime import CrossEncoder
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ModelError
from hdruntime.jobs.rows import Columns
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer
from support.chat_rerankers import MXBAI_RERANK, QWEN3_RERANKER, save_chat_reranker
from support.comparators import assert_close
from support.job_runs import read, run
from support.made_once import made_once

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 2e-5
"""Measured, of logits up to 20: 1.1e-5."""

POSITIONS = 400
"""Of which a template has 200: the vocabulary is small."""

QUERY = "How many people live in Berlin?"
LONG = "The Spree flows through Berlin, past museums, and 3.8 million people live there. " * 12
DOCUMENTS = ["Berlin had a population of 3,520,031 in 2019.", "", LONG[:150], LONG, "\n\n", "e\u0301t\u00e9 \U0001f642"]


class Layout(NamedTuple):
    """A published reranker: what `save_chat_reranker` writes of it, and the names that its publisher gives the parts.

    `instruct` writes an instruction before the query; `default` is used where a caller gives none. `by_line` says that
    the publisher's code makes tokens of each line by itself.
    """

    saved: dict[str, Any]
    answers: tuple[str, str]
    instruct: str
    default: str
    before: tuple[str, str]
    by_line: bool = False


QWEN3 = Layout(
    saved={"template": QWEN3_RERANKER, "has_modules": False},
    answers=("yes", "no"),
    instruct="<Instruct>: {}\n",
    default="Given a web search query, retrieve relevant passages that answer the query",
    before=("<Query>: ", "\n<Document>: "),
)
MXBAI = Layout(
    saved={"template": MXBAI_RERANK, "answers": ("1", "0"), "model_type": "qwen2"},
    answers=("1", "0"),
    instruct="instruction: {}\n",
    default="",
    before=("query: ", "\ndocument: "),
    by_line=True,
)
LAYOUTS = {"qwen3-reranker": QWEN3, "mxbai-rerank-v2": MXBAI}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a layout -> a folder with a tiny model as ``checkpoint``, and with its ``bundle``."""

    def save_and_build(name: str) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            from hdexport.build import BuildOptions, build

            save_chat_reranker(directory / "checkpoint", positions=POSITIONS, **LAYOUTS[name].saved)
            options = {"max_len": POSITIONS, "task": Task.TEXT_CLASSIFICATION}
            build(BuildOptions(model=directory / "checkpoint", output=directory / "bundle", **options))

        return make

    return lambda name: made_once(tmp_path_factory, f"published {name}", save_and_build(name))


def ids_by_publisher(directory: Path, layout: Layout, pair: tuple[str, str], prompt: str, max_len: int) -> list[int]:
    """The ids of a pair, whose text is cut where it and the template's two ends have more than `max_len`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "checkpoint")
    instruct = prompt or layout.default
    texts = [layout.instruct.format(instruct) if instruct else ""]
    texts += [written for parts in zip(layout.before, pair, strict=True) for written in parts]
    template = layout.saved["template"]
    beginning = template[: template.index("user\n") + len("user\n")]
    end = template[template.rindex("}}") + 2 : -1]
    lines = "".join(texts)
    parts = re.split("(\n)", lines) if layout.by_line else [lines]
    ends = ["\n", end.removeprefix("\n")] if layout.by_line else [end]
    first, ids, last = (
        [number for part in found for number in tokenizer(part, add_special_tokens=False)["input_ids"]]
        for found in ([beginning], parts, ends)
    )
    return [*first, *ids[: max_len - len(first) - len(last)], *last]


def logits_by_publisher(directory: Path, layout: Layout, texts: list[list[int]]) -> np.ndarray:
    """The logits of the two answers after each text's last token, [texts, 2], one padded batch of them."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "checkpoint", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "checkpoint", padding_side="left")
    batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**batch).logits[:, -1]
    return logits[:, tokenizer.convert_tokens_to_ids(layout.answers)].numpy()


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_are_those_of_the_publishers_code_and_of_sentence_transformers(
    saved: Callable[[str], Path], name: str
) -> None:
    directory, layout = saved(name), LAYOUTS[name]
    pairs = [(QUERY, document) for document in DOCUMENTS]
    theirs = sentence_transformers.CrossEncoder(str(directory / "checkpoint"), device="cpu", max_length=POSITIONS)
    with CrossEncoder(directory / "bundle", backend="onnxruntime") as ours:
        for prompt in ("", "Find the city's page"):
            texts = [ids_by_publisher(directory, layout, pair, prompt, POSITIONS) for pair in pairs]
            assert max(map(len, texts)) == POSITIONS, "some are cut"
            logits = logits_by_publisher(directory, layout, texts)
            expected = logits[:, 0] - logits[:, 1]
            found = ours.predict(pairs, prompt=prompt, activation_fn="identity")
            assert_close(found, expected, atol=ATOL)
            assert np.abs(expected - expected[0]).max() > 0.1
            with pytest.raises(AssertionError):
                assert_close(found, -expected, atol=100 * ATOL)
            probable = np.exp(logits[:, 0]) / np.exp(logits).sum(axis=1)
            assert_close(ours.predict(pairs, prompt=prompt), probable, atol=ATOL)
            assert_close(ours.predict(pairs, prompt=prompt), theirs.predict(pairs, prompt=prompt), atol=ATOL)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_are_those_of_the_publishers_code_at_every_length(saved: Callable[[str], Path], name: str) -> None:
    directory, layout = saved(name), LAYOUTS[name]
    template = open_bundle(directory / "bundle").manifest.template
    for max_len in (300, 301, POSITIONS):
        tokenizer = TextTokenizer(directory / "bundle" / "tokenizer.json", max_len=max_len, template=template)
        for prompt in ("", "Find the city's page"):
            encodings = tokenizer.encode([QUERY] * len(DOCUMENTS), DOCUMENTS, overflow=Overflow.TRUNCATE, prompt=prompt)
            for document, encoding in zip(DOCUMENTS, encodings, strict=True):
                expected = ids_by_publisher(directory, layout, (QUERY, document), prompt, max_len)
                assert encoding.input_ids == expected, (max_len, prompt, document)
            assert max(map(len, encodings)) == max_len, "some are cut"


def test_the_documentation_has_the_template() -> None:
    page = Path(__file__).parents[2] / "docs" / "reranking.md"
    assert f"```jinja\n{QWEN3_RERANKER}```" in page.read_text()


def test_a_generator_whose_template_has_no_place_for_a_pair_is_refused(tmp_path: Path) -> None:
    from hdexport.build import BuildOptions, build

    checkpoint, chats = tmp_path / "checkpoint", "{% for message in messages %}{{ message.role }}{% endfor %}"
    save_chat_reranker(checkpoint, template=chats, has_modules=False)
    options = BuildOptions(model=checkpoint, output=tmp_path / "bundle", max_len=64, task=Task.TEXT_CLASSIFICATION)
    with pytest.raises(ModelError, match=r"writes the query of a pair 0 times.*\nA template that fits has both texts"):
        build(options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_session_and_job_rank_as_the_encoder(saved: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    bundle = saved(name) / "bundle"
    inputs, output = tmp_path / "pairs.jsonl", tmp_path / "scores.jsonl"
    inputs.write_text("".join(json.dumps({"query": QUERY, "document": document}) + "\n" for document in DOCUMENTS))
    run(bundle, inputs, output, columns=Columns(text="query", text_pair="document"), overflow=Overflow.TRUNCATE)
    scores = np.array([row["score"] for row in read(output)], np.float32)
    with CrossEncoder(bundle, max_length="bundle", backend="onnxruntime") as encoder:
        assert_close(encoder.predict([(QUERY, document) for document in DOCUMENTS]), scores, atol=ATOL)
    with hdruntime.load(bundle, "onnxruntime") as session:
        ranked = session.rank(QUERY, DOCUMENTS, overflow="truncate")
    assert [each["corpus_id"] for each in ranked] == np.argsort(-scores, kind="stable").tolist()
