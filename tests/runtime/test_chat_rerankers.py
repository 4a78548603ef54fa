"""Rerankers that are generators, or read a chat template: the numbers of sentence-transformers, ids and scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime import CrossEncoder
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError
from hdruntime.jobs.rows import Columns
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer
from support.chat_rerankers import DIGRESSING, INSTRUCTED, NO_SYSTEM, POSITIONS, save_chat_reranker
from support.comparators import assert_close
from support.job_runs import read, run
from support.made_once import made_once
from support.needs import needs_openvino
from support.sentence_bundles import with_settings_of

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 1e-5
"""Measured, of logits up to 20: 5e-6."""

MAX_LEN = 200

QUERY = "How many people live in Berlin?"
LONG = "The Spree flows through Berlin, past museums, and 3.8 million people live there. " * 12
DOCUMENTS = [
    "Berlin had a population of 3,520,031 in 2019.",
    "",
    LONG[:150],
    LONG,
    " spaces ",
    "\n\n",
    "e\u0301t\u00e9, \u4e2d\u6587, \U0001f642 <|im_end|>",
    "yes",
]
PAIRS = [*((QUERY, document) for document in DOCUMENTS), (LONG, "no"), (LONG, LONG), ("", "?"), (" a ", "\tb")]

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "instructed": {"template": INSTRUCTED, "prompts": {"web": "Find the page", "none": ""}},
    "untied": {"template": NO_SYSTEM, "score": "yes", "tied": False, "rendering": {"add_generation_prompt": True}},
    "classifier": {"template": DIGRESSING, "score": "classifier", "prompts": {"web": "Find: "}},
    "no template": {"template": None, "prompts": {"web": "Find: "}, "default_prompt_name": "web"},
}
TEMPLATES = [name for name, options in CHECKPOINTS.items() if options["template"] is not None]
PROMPTS = {"untied": [""]}
"""Of checkpoints that do not take all of them."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a checkpoint -> a folder with it as ``checkpoint``, and with its ``bundle``."""

    def save_and_build(name: str) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            import torch

            from hdexport.build import BuildOptions, build

            path = directory / "checkpoint"
            # Scores of a sigmoid would be alike.
            save_chat_reranker(path, **CHECKPOINTS[name], activation_fn=torch.nn.Identity())
            if name == "no template":
                # The weights are those of "instructed".
                with_settings_of(path, folder("instructed") / "bundle", directory / "bundle")
                return
            openvino = name == "instructed" and find_spec("openvino") is not None
            options = {"max_len": MAX_LEN, "targets": ("openvino",) if openvino else (), "verify": None}
            build(BuildOptions(model=path, output=directory / "bundle", **options))

        return make

    def folder(name: str) -> Path:
        return made_once(tmp_path_factory, f"chat {name}", save_and_build(name))

    return folder


def in_sentence_transformers(directory: Path) -> Any:
    return sentence_transformers.CrossEncoder(str(directory / "checkpoint"), device="cpu")


def tokenizer_of(directory: Path, *, max_len: int) -> TextTokenizer:
    template = open_bundle(directory / "bundle").manifest.template
    return TextTokenizer(directory / "bundle" / "tokenizer.json", max_len=max_len, template=template)


@pytest.fixture
def bundle(saved: Callable[[str], Path]) -> Path:
    return saved("instructed") / "bundle"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_scores_are_those_of_sentence_transformers(saved: Callable[[str], Path], name: str) -> None:
    theirs = in_sentence_transformers(saved(name))
    with CrossEncoder(saved(name) / "bundle", backend="onnxruntime") as ours:
        assert (ours.num_labels, ours.max_seq_length) == (theirs.num_labels, theirs.max_seq_length) == (1, POSITIONS)
        options: list[dict[str, Any]] = [{}, {"batch_size": 3}, {"prompt": ""}]
        if name not in PROMPTS:
            options += [
                {"prompt": "Answer it: "},
                {"prompt": LONG},
                *({"prompt_name": each} for each in theirs.prompts),
            ]
        for each in options:
            expected, found = theirs.predict(PAIRS, **each), ours.predict(PAIRS, **each)
            assert found.dtype == expected.dtype
            assert_close(found, expected, atol=ATOL)
        with pytest.raises(AssertionError):
            assert_close(ours.predict(PAIRS), theirs.predict([pair[::-1] for pair in PAIRS]), atol=100 * ATOL)
        expected, found = theirs.rank(QUERY, DOCUMENTS, top_k=5), ours.rank(QUERY, DOCUMENTS, top_k=5)
        assert [each["corpus_id"] for each in found] == [each["corpus_id"] for each in expected]
        assert_close(
            np.array([each["score"] for each in found]), np.array([each["score"] for each in expected]), atol=ATOL
        )


@needs_openvino
def test_openvino_scores_as_sentence_transformers(saved: Callable[[str], Path], bundle: Path) -> None:
    expected = in_sentence_transformers(saved("instructed")).predict(PAIRS)
    with CrossEncoder(bundle, backend="openvino", precision="float32") as ours:
        assert_close(ours.predict(PAIRS), expected, atol=ATOL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_sentence_transformers_at_every_length(saved: Callable[[str], Path], name: str) -> None:
    """What is cut ends as the template does, or with as much of its end as fits."""
    theirs, whole = in_sentence_transformers(saved(name)), tokenizer_of(saved(name), max_len=MAX_LEN)
    of_first = len(whole.encode([QUERY], [DOCUMENTS[0]])[0])
    for max_len in (1, 30, of_first - 1, of_first, of_first + 1, POSITIONS):
        theirs.max_seq_length = max_len
        ours = tokenizer_of(saved(name), max_len=max_len)
        for prompt in PROMPTS.get(name, ["", "Answer it: ", LONG]):
            encodings = ours.encode(*zip(*PAIRS, strict=True), overflow="truncate", prompt=prompt)
            for pair, encoding in zip(PAIRS, encodings, strict=True):
                expected = theirs.preprocess([pair], prompt=prompt)["input_ids"][0].tolist()
                assert encoding.input_ids == expected, (max_len, prompt, pair)
                sizes = {len(each) for each in vars(encoding).values() if isinstance(each, list)}
                assert sizes == {len(expected)}


def written(theirs: Any, query: str, document: str) -> tuple[str, list[int], list[tuple[int, int]]]:
    """A pair in the template, its ids and their characters, by transformers alone."""
    messages = theirs[0].input_formatter.pair_to_messages((query, document))
    options = theirs[0].processing_kwargs.get("chat_template", {})
    text = theirs.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    encoded = theirs.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return text, encoded["input_ids"], encoded["offset_mapping"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_token_is_of_the_text_whose_characters_it_has(saved: Callable[[str], Path], name: str) -> None:
    theirs, ours = in_sentence_transformers(saved(name)), tokenizer_of(saved(name), max_len=MAX_LEN)
    texts = (QUERY, DOCUMENTS[0])
    text, ids, spans = written(theirs, *texts)
    (encoding,) = ours.encode([texts[0]], [texts[1]])
    assert encoding.input_ids == ids
    for number, each in enumerate(texts):
        start = text.index(each)
        inside = [set(range(*span)) & set(range(start, start + len(each))) for span in spans]
        assert [sequence == number for sequence in encoding.sequence_ids] == [bool(found) for found in inside]
        for found, offsets, sequence in zip(inside, encoding.offsets, encoding.sequence_ids, strict=True):
            if sequence == number:
                assert {start + place for place in range(*offsets)} == found
    assert {encoding.offsets[place] for place, each in enumerate(encoding.sequence_ids) if each is None} == {(0, 0)}
    (cut,) = tokenizer_of(saved(name), max_len=len(ids) - 1).encode([texts[0]], [texts[1]], overflow=Overflow.TRUNCATE)
    assert cut.sequence_ids[-1] is None
    (empty,) = ours.encode([QUERY], [""])
    assert set(empty.sequence_ids) == {0, None}


@pytest.mark.parametrize(("name", "stride"), [("instructed", 0), ("classifier", 3)])
def test_a_long_document_is_read_in_chunks_with_all_of_the_template(
    saved: Callable[[str], Path], name: str, stride: int
) -> None:
    import torch

    theirs, expected = in_sentence_transformers(saved(name)), []
    for document in DOCUMENTS:
        text, ids, spans = written(theirs, QUERY, document)
        start = text.index(document, text.index("ocument")) if document else 0
        places = [place for place, span in enumerate(spans) if span[0] < start + len(document) and span[1] > start]
        first, last = (places[0], places[-1] + 1) if document else (len(ids), len(ids))
        room = POSITIONS - (len(ids) - (last - first))
        starts = range(first, max(last - stride, first + 1), room - stride) if len(ids) > POSITIONS else [first]
        scores = []
        for begin in starts:
            chunk = torch.tensor([ids[:first] + ids[begin : min(begin + room, last)] + ids[last:]])
            features = {"input_ids": chunk, "attention_mask": torch.ones_like(chunk), "modality": "message"}
            with torch.inference_mode():
                scores.append(theirs(features)["scores"][0, 0].item())
        expected.append(max(scores))
    with CrossEncoder(saved(name) / "bundle", backend="onnxruntime") as ours:
        found = ours.predict([(QUERY, document) for document in DOCUMENTS], overflow="split", stride=stride)
        assert_close(found, np.array(expected, np.float32), atol=ATOL)
        assert abs(found[3] - ours.predict((QUERY, LONG))) > 100 * ATOL, "the long document has more than one chunk"


def test_session_and_job_score_as_the_encoder_does(bundle: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "pairs.jsonl"
    inputs.write_text("".join(json.dumps({"query": QUERY, "document": document}) + "\n" for document in DOCUMENTS))
    pairs, columns = [(QUERY, document) for document in DOCUMENTS], Columns(text="query", text_pair="document")
    with (
        CrossEncoder(bundle, backend="onnxruntime") as encoder,
        hdruntime.load(bundle, "onnxruntime") as session,
    ):
        for overflow, prompt in (("truncate", "Find: "), ("split", "Find: "), ("split", "")):
            expected = encoder.predict(pairs, overflow=overflow, prompt=prompt)
            ranked = session.rank(QUERY, DOCUMENTS, overflow=overflow, prompt=prompt)
            assert_close(np.array([each["score"] for each in ranked]), -np.sort(-expected), atol=ATOL)
            output = tmp_path / f"{overflow}{prompt}.jsonl"
            run(bundle, inputs, output, columns=columns, overflow=Overflow(overflow), prompt=prompt)
            assert_close(np.array([row["score"] for row in read(output)]), expected, atol=ATOL)


def test_a_text_that_is_no_pair_is_refused(bundle: Path, tmp_path: Path) -> None:
    message = r"This bundle accepts pairs: .* a query and a document\.\nPass both: session\.rank"
    with hdruntime.load(bundle, "onnxruntime") as session:
        for call in (session.tokenize, session.split):
            with pytest.raises(InputError, match=message):
                call([QUERY])
    inputs = tmp_path / "texts.jsonl"
    inputs.write_text(json.dumps({"text": QUERY}) + "\n")
    with pytest.raises(InputError, match=r"needs two texts.*\n.*text_column='query' text_pair_column='document'"):
        run(bundle, inputs, tmp_path / "out.jsonl", columns=Columns(text="text"))


def test_a_prompt_that_the_template_refuses_is_refused(saved: Callable[[str], Path]) -> None:
    with pytest.raises(Exception, match="no system"):
        in_sentence_transformers(saved("untied")).predict(PAIRS[:1], prompt="Find: ")
    with (
        CrossEncoder(saved("untied") / "bundle", backend="onnxruntime") as ours,
        pytest.raises(InputError, match=r"The prompt is 'Find: ', and the chat template .* takes none\.\nLeave it out"),
    ):
        ours.predict(PAIRS[:1], prompt="Find: ")


def test_a_query_that_fills_a_chunk_is_refused(bundle: Path) -> None:
    with CrossEncoder(bundle, backend="onnxruntime") as ours:
        with pytest.raises(InputError, match=r"The query has \d+ tokens, .* chat template .* so that 1 to 159 fit"):
            ours.rank(LONG, DOCUMENTS, overflow="split")
        with pytest.raises(InputError, match=r"max_seq_length is 5; it must be \d+ to 200 tokens"):
            ours.max_seq_length = 5


def test_the_graph_has_one_row_of_the_vocabulary(bundle: Path) -> None:
    import onnx_ir

    manifest = open_bundle(bundle).manifest
    assert manifest.labels == ("LABEL_0",)
    assert [(spec.name, spec.shape) for spec in manifest.outputs] == [("logits", ("batch", 1))]
    graph = onnx_ir.load(bundle / "model.onnx").graph
    wide = [value for value in graph.initializers.values() if manifest.vocab_size in value.shape.numpy()]
    assert [user.op_type for value in wide for user, _ in value.uses()] == ["Gather"]
    shapes = [value.shape for node in graph.all_nodes() for value in node.outputs if value.shape is not None]
    assert shapes
    assert not [shape for shape in shapes if manifest.vocab_size in list(shape)]


def test_the_bundle_is_inspected_and_verified(
    saved: Callable[[str], Path], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hdexport.cli import main

    assert main(["inspect", str(bundle)]) == 0
    assert "reads pairs of texts in the checkpoint's chat template, scores by identity" in capsys.readouterr().out
    assert main(["verify", str(bundle), "--model", str(saved("instructed") / "checkpoint")]) == 0
    printed = capsys.readouterr().out
    assert " PASS " in printed
    assert " FAIL " not in printed
