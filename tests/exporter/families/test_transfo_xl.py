"""Transformer-XL answers as transformers 4 did, segment after segment, and scores tokens as its softmax did."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.trust import Trust
from hdexport.families import family_of
from hdexport.families.transfo_xl.adaptive import AdaptiveSoftmax
from hdexport.families.transfo_xl.config import TransfoXLConfig
from hdruntime.bundle.graph_interface import state_at_start
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, ModelError
from hdruntime.jobs import JobOptions, plan_job
from hdruntime.jobs.rows import Columns
from hdruntime.text.encoding import Overflow
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.job_runs import read, run
from support.tiny_models import change_json, save_tiny_model
from support.verified import verified

DATA = Path(__file__).parents[2] / "data" / "transfo_xl"
VARIANTS = ("clusters", "pre_lnorm", "shared_biases", "untied")

ATOL = 2e-5

OUTPUTS = {Task.FEATURE_EXTRACTION: "last_hidden_state", Task.TEXT_SCORING: "log_probabilities"}


@dataclass(frozen=True)
class Expected:
    """Answers of transformers 4 for a batch of documents; see tests/data/transfo_xl/make.py for the axes."""

    segments: list[int]
    ids: np.ndarray
    states: np.ndarray
    scores: np.ndarray
    mems: np.ndarray

    def of_task(self, task: Task) -> np.ndarray:
        return self.scores if task is Task.TEXT_SCORING else self.states


def expected_answers(variant: str, rows: int) -> Expected:
    with np.load(DATA / variant / "expected.npz") as stored:
        arrays = {name: stored[f"{name}_{rows}"] for name in ("ids", "states", "scores", "mems")}
        return Expected(segments=stored["segments"].tolist(), **arrays)


def copy_of(variant: str, directory: Path) -> Path:
    return shutil.copytree(DATA / variant, directory / variant)


@pytest.mark.parametrize(
    ("variant", "task"), [*((name, Task.TEXT_SCORING) for name in VARIANTS), ("clusters", Task.FEATURE_EXTRACTION)]
)
def test_the_module_answers_as_transformers_4_did(variant: str, task: Task) -> None:
    model = find_checkpoint(DATA / variant, trust=Trust(allow_pickle=True)).load(task)
    for rows in (1, 3):
        expected = expected_answers(variant, rows)
        mems, found = None, []
        with torch.inference_mode():
            for ids in torch.from_numpy(expected.ids).split(expected.segments, dim=1):
                output = model(ids, mems=mems)
                mems = output.mems
                found.append(output[OUTPUTS[task]])
        with named_case(f"{rows} rows"):
            assert_close(torch.cat(found, dim=1).numpy(), expected.of_task(task), atol=1e-5)
            for layer, memory in enumerate(expected.mems):
                assert_close(mems[str(layer)].numpy(), memory, atol=1e-5)


def streams(bundle: Any, rows: int) -> dict[str, Callable[..., dict[str, np.ndarray]]]:
    """Name of a graph -> function that runs one segment after the other, of so many rows, with what is remembered."""
    return {name: stream(bundle, getattr(bundle, name), rows) for name in ("portable", "session")}


def stream(bundle: Any, run: Callable[..., dict[str, np.ndarray]], rows: int) -> Callable[..., dict[str, np.ndarray]]:
    manifest = bundle.manifest
    carried = {
        spec.name: state_at_start(spec, rows=rows, memory=manifest.max_memory) for spec in manifest.recurrent_states
    }

    def call(input_ids: np.ndarray, attention_mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
        outputs = run(input_ids=input_ids, attention_mask=mask, **carried)
        carried.update({spec.name: outputs[spec.fed_from] for spec in bundle.manifest.recurrent_states})
        return outputs

    return call


def chunks(ids: np.ndarray, segments: Sequence[int]) -> list[np.ndarray]:
    return np.split(ids, list(itertools.accumulate(segments))[:-1], axis=1)


# Scoring has the layers of the other task, and shows what they leave.
@pytest.mark.parametrize(
    ("variant", "task"),
    [
        *(nightly_unless(name == "clusters", name, Task.TEXT_SCORING) for name in VARIANTS),
        nightly_unless(False, "clusters", Task.FEATURE_EXTRACTION),
    ],
)
def test_bundles_answer_as_transformers_4_did(stored_bundles, variant: str, task: Task) -> None:
    bundle = stored_bundles(DATA / variant, task)
    for rows in (1, 3):
        expected = expected_answers(variant, rows)
        for name, call in streams(bundle, rows).items():
            outputs = [call(input_ids=ids) for ids in chunks(expected.ids, expected.segments)]
            with named_case(name, f"{rows} rows"):
                answers = np.concatenate([output[OUTPUTS[task]] for output in outputs], axis=1)
                assert_close(answers, expected.of_task(task), atol=ATOL)
                for layer, memory in enumerate(expected.mems):
                    assert_close(outputs[-1][f"new_mems.{layer}"], memory, atol=ATOL)


@pytest.mark.parametrize("segments", [(1, 1, 16, 16), (15, 3, 1, 15)])
def test_where_all_tokens_see_equally_far_segments_change_nothing(stored_bundles, segments: tuple[int, ...]) -> None:
    bundle, expected = stored_bundles(DATA / "clusters", "text-scoring"), expected_answers("clusters", 3)
    for name, call in streams(bundle, 3).items():
        outputs = [call(input_ids=ids)["log_probabilities"] for ids in chunks(expected.ids, segments)]
        with named_case(name):
            assert_close(np.concatenate(outputs, axis=1), expected.scores, atol=ATOL)


def test_a_job_scores_documents_of_more_tokens_than_a_segment(stored_bundles, tmp_path: Path) -> None:
    bundle, expected = stored_bundles(DATA / "clusters", "text-scoring"), expected_answers("clusters", 3)
    rows = [json.dumps({"ids": ids.tolist()}) for ids in expected.ids]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    columns = Columns(input_ids="ids")
    run(bundle.path, tmp_path / "in.jsonl", tmp_path / "out.jsonl", columns=columns, overflow=Overflow.RECUR)
    for row, scores in zip(read(tmp_path / "out.jsonl"), expected.scores, strict=True):
        assert_close(np.array(row["log_probabilities"]), scores, atol=ATOL)
        assert row["perplexity"] == pytest.approx(np.exp(-scores[1:].mean()), rel=ATOL)


def test_pieces_that_are_run_by_themselves_are_not_scored(stored_bundles, tiny_bundles, tmp_path: Path) -> None:
    bundle = stored_bundles(DATA / "clusters", "text-scoring")
    with_tokenizer = dataclasses.replace(bundle.manifest, tokenizer=tiny_bundles("bert").manifest.tokenizer)
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"text": "w1"}')
    options = JobOptions(overflow=Overflow.SPLIT)
    with pytest.raises(InputError, match=r"texts are not split\.\nStream them: overflow="):
        plan_job(Bundle(bundle.path, with_tokenizer), [rows], tmp_path / "out.jsonl", options=options)


def test_padding_behind_a_document_changes_nothing_and_is_not_remembered(stored_bundles) -> None:
    """Rows of 9, 4 and no tokens; what follows them continues each document where it ended."""
    bundle, expected = stored_bundles(DATA / "clusters", "text-scoring"), expected_answers("clusters", 3)
    first, lengths = expected.ids[:, :7], np.array([9, 4, 0])
    mask = (np.arange(9) < lengths[:, None]).astype(np.int64)
    for filler in (0, 59):
        for name, call in streams(bundle, 3).items():
            call(input_ids=first)
            padded = call(input_ids=np.where(mask == 1, expected.ids[:, 7:16], filler), attention_mask=mask)
            after = call(input_ids=expected.ids[:, :5])
            with named_case(name, f"filler {filler}"):
                assert (padded["log_probabilities"][mask == 0] == 0).all()
                for row, length in enumerate(lengths):
                    alone = streams(bundle, 1)[name]
                    row_ids = expected.ids[row : row + 1]
                    alone(input_ids=row_ids[:, :7])
                    if length:
                        scores = alone(input_ids=row_ids[:, 7 : 7 + length])["log_probabilities"]
                        assert_close(padded["log_probabilities"][row, :length], scores[0], atol=ATOL)
                    continued = alone(input_ids=row_ids[:, :5])
                    for output in ("log_probabilities", *(spec.fed_from for spec in bundle.manifest.recurrent_states)):
                        assert_close(after[output][row], continued[output][0], atol=ATOL)


def test_padding_before_a_text_is_not_seen() -> None:
    """Without a memory, whose distance padding would change."""
    config = TransfoXLConfig(**family_sizes(mem_len=0, same_length=False))
    model = random_model(Task.TEXT_SCORING, config)
    ids = torch.from_numpy(expected_answers("clusters", 3).ids[:, :12])
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    with torch.inference_mode():
        padded, alone = model(ids, attention_mask=mask), model(ids[:, 5:])
    assert_close(padded.log_probabilities[:, 5:].numpy(), alone.log_probabilities.numpy(), atol=1e-5)
    assert (padded.log_probabilities[:, :5] == 0).all()


def family_sizes(**changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 60, "cutoffs": [20, 35], "d_model": 24, "d_embed": 24, "n_head": 3, "d_head": 8}
    return sizes | {"d_inner": 32, "n_layer": 2, "mem_len": 9, "div_val": 2} | changes


def random_model(task: Task, config: TransfoXLConfig) -> Any:
    torch.manual_seed(0)
    model = family_of("transfo-xl").classes.models[task](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    return model


@pytest.mark.parametrize(
    "sizes", [{"div_val": 2}, {"div_val": 1}, {"div_val": 1, "d_embed": 16}, {"cutoffs": [], "div_val": 1}]
)
def test_probabilities_of_all_tokens_add_up_to_1(sizes: dict[str, Any]) -> None:
    softmax = random_model(Task.TEXT_SCORING, TransfoXLConfig(**family_sizes(**sizes))).crit
    softmax.most_logits = 7  # in several parts
    states = torch.randn(1, 5, 24).repeat_interleave(60, dim=0)  # [tokens of the vocabulary, 5, d_model]
    with torch.inference_mode():
        scores = softmax(states, torch.arange(60)[:, None].expand(60, 5))
    assert scores.std() > 0.5
    torch.testing.assert_close(scores.exp().sum(0), torch.ones(5))


class WidestStates(TorchFunctionMode):
    """Notes the largest last axis of what functions make of a batch."""

    most = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 3:
            self.most = max(self.most, result.shape[-1])
        return result


def test_no_more_logits_than_a_chunk_are_in_memory() -> None:
    softmax = AdaptiveSoftmax(TransfoXLConfig(**family_sizes(vocab_size=3000, cutoffs=[700, 900])))
    for most_logits in (64, 16384):
        softmax.most_logits = most_logits
        with WidestStates() as widest, torch.inference_mode():
            softmax(torch.zeros(2, 5, 24), torch.zeros(2, 5, dtype=torch.int64))
        assert widest.most == min(most_logits, 2100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cutoffs": [35, 20]}, r"cutoffs is \[35, 20\]; it must ascend within 1 to vocab_size - 1 \(59\)"),
        ({"adaptive": False}, "adaptive is false; adaptive embeddings, true, are supported"),
        ({"div_val": 5}, "d_embed 24 divided by div_val 5 for each of 2 cutoffs leaves no width"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    checkpoint = copy_of("clusters", tmp_path)
    change_json(checkpoint / "config.json", **changes)
    with pytest.raises(ModelError, match=f"(?s)config.json does not describe a transfo-xl: .*{message}"):
        find_checkpoint(checkpoint).load(Task.TEXT_SCORING)


def test_a_token_that_would_see_none_is_refused(tiny_bundles) -> None:
    with pytest.raises(ModelError, match=r"mem_len 0 and same_length(.|\n)*recurrence=512"):
        tiny_bundles("transfo-xl", same_length=True)


def test_another_memory_than_in_training_is_asked_for(traced_models) -> None:
    model = traced_models("transfo-xl", "text-scoring", recurrence=12, same_length=True)
    assert model.manifest.max_memory == 12


def test_scores_are_verified_against_pytorch(stored_bundles) -> None:
    found = verified(stored_bundles(DATA / "clusters", "text-scoring"))
    assert found.passed
    assert {"log_probabilities", "new_mems.0", "new_mems.last"} <= set(found.checks[0].outputs)


def test_a_converted_tokenizer_is_read(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "transfo-xl", Task.TEXT_SCORING)
    (tmp_path / "vocab.pkl").write_bytes(b"not read")
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class="TransfoXLTokenizer")
    assert find_checkpoint(tmp_path).tokenizer("w1 w2").input_ids == [0, 6, 7, 2]


def test_the_task_is_that_of_the_head() -> None:
    checkpoint = find_checkpoint(DATA / "clusters")
    assert checkpoint.task() is Task.TEXT_SCORING
    with pytest.raises(
        ModelError,
        match=r"fill-mask of a transfo-xl is not supported\. The model has no head(.|\n)*task='feature-extraction'",
    ):
        checkpoint.load(Task.FILL_MASK)
