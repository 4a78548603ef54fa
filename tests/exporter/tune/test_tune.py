"""Tuned checkpoints: what is trained and what keeps every bit, what continues, and what stops."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from hdexport.attention.registry import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.extended_files import read_extension
from hdexport.checkpoint.position_choice import choose_positions
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.support.progress import Progress
from hdexport.tune import training
from hdexport.tune.corpus import read_corpus
from hdexport.tune.objectives import Contrast
from hdexport.tune.options import Loss, Trained, TuneOptions
from hdexport.tune.run import RECORD_FILE, Tuned, tune
from hdexport.tune.student import make_student
from hdexport.tune.training import kept_steps
from hdruntime.bundle.manifest import Scheme, Task
from hdruntime.errors import HdexportError, InputError, ModelError, NonFiniteOutputError
from support.grids import nightly_unless
from support.tiny_models import BASE, save_sentence_modules, save_tiny_model
from support.waiting import wait_until

WEIGHTS = "model.safetensors"
TABLE = "embeddings.position_embeddings.weight"
MAX_LEN = 200

Run = Callable[..., Tuned]


def texts_of_topics(file: Path, *, documents: int = 24, sentences: int = 14) -> Path:
    """Long texts of few words each, so that a sentence tells which text it is of."""
    draw = random.Random(0)
    rows = []
    for _ in range(documents):
        words = [f"w{number}" for number in draw.sample(range(110), 10)]
        rows.append({"text": " ".join(" ".join([*draw.choices(words, k=12), "\u3002"]) for _ in range(sentences))})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return texts_of_topics(tmp_path / "texts.jsonl")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny embedding model."""
    save_tiny_model(tmp_path / "model", "bert", Task.FEATURE_EXTRACTION)
    save_sentence_modules(tmp_path / "model", "Normalize", pooling={"pooling_mode_mean_tokens": True})
    return tmp_path / "model"


@pytest.fixture
def run(model: Path, texts: Path, tmp_path: Path) -> Run:
    """Tune the tiny model for a few steps: (**options)."""

    def tuned(**changes: Any) -> Tuned:
        options = {"model": model, "texts": texts, "output": tmp_path / "tuned", "max_len": MAX_LEN, "steps": 4}
        return tune(TuneOptions(**(options | {"batch_tokens": 600} | changes)))

    return tuned


@pytest.mark.parametrize(
    ("loss", "scheme"), [(Loss.CONTRAST, Scheme.HIERARCHICAL), (Loss.DISTILL, Scheme.INTERPOLATE_STATIC)]
)
def test_only_new_rows_change_and_all_else_keeps_every_bit(
    run: Run, model: Path, tmp_path: Path, loss: Loss, scheme: Scheme
) -> None:
    run(loss=loss, scheme=scheme)
    run(loss=loss, scheme=scheme, output=tmp_path / "start", learning_rate=1e-12, steps=1)
    before, after, start = (load_file(path / WEIGHTS) for path in (model, tmp_path / "tuned", tmp_path / "start"))
    table = after.pop(TABLE)
    assert torch.equal(table[:BASE], before.pop(TABLE))
    assert all(torch.equal(after[name], before[name]) for name in before | after)
    # The last rows, which no text has, move with the others.
    assert ((table - start[TABLE])[BASE:].abs().amax(1) > 1e-4).all()


@pytest.mark.parametrize(
    "model_type",
    [
        # Without rows in front of the table and with such rows; an attention type; a table by another name.
        nightly_unless(name in ("roberta", "longformer", "performer"), name)
        for name in SUPPORTED_MODEL_TYPES
        if family_of(name).learned_positions and family_of(name).tuning_unsupported_reason is None
    ],
)
def test_every_family_with_a_table_is_tuned(run: Run, tmp_path: Path, model_type: str) -> None:
    other = tmp_path / model_type
    save_tiny_model(other, model_type, Task.FEATURE_EXTRACTION)
    scale = {} if family_of(model_type).native_attention is None else {"attention_scale": "none"}
    done = run(model=other, loss=Loss.DISTILL, steps=1, **scale)
    name = next(name for name in load_file(other / WEIGHTS) if name.endswith(family_of(model_type).position_table))
    before, after = (load_file(path / WEIGHTS)[name] for path in (other, tmp_path / "tuned"))
    assert torch.equal(after[: len(before)], before)
    assert len(after) == len(before) - BASE + MAX_LEN
    assert done.extension.base == BASE


def test_a_family_that_is_not_tuned_says_why(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "reformer"
    save_tiny_model(other, "reformer", Task.FEATURE_EXTRACTION, axial_pos_embds=False)
    with pytest.raises(
        ModelError, match=r"cannot be tuned\. Transformers trains it at multiples of a chunk only(.|\n)*hdexport build"
    ):
        run(model=other, loss=Loss.DISTILL, steps=1, attention_scale="none")
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("options", "least"),
    [
        nightly_unless(False, {"loss": Loss.CONTRAST}, 0.05),
        nightly_unless(False, {"loss": Loss.DISTILL}, 0.01),
        nightly_unless(False, {"loss": Loss.DISTILL, "attention": "window:16"}, 0.01),
        ({"loss": Loss.CONTRAST, "attention_scale": "none", "gradient_checkpointing": True}, 0.05),
    ],
    ids=["contrast", "distill", "windows", "checkpointing"],
)
def test_the_loss_goes_down(run: Run, texts: Path, options: dict[str, Any], least: float) -> None:
    texts_of_topics(texts, documents=12)
    # All documents in each step, so that steps differ in nothing but the weights and the sentences that are drawn.
    losses = run(**{"learning_rate": 3e-2, "steps": 10, "batch_tokens": 12 * MAX_LEN} | options).outcome.losses
    # The first step has few other texts to tell from.
    assert sum(losses[1:4]) / 3 - sum(losses[-3:]) / 3 > least


def test_masked_tokens_are_learnt_where_the_checkpoint_has_that_head(run: Run, texts: Path, tmp_path: Path) -> None:
    texts_of_topics(texts, documents=12)
    save_tiny_model(tmp_path / "mlm", "bert", Task.FILL_MASK)
    done = run(model=tmp_path / "mlm", learning_rate=3e-2, steps=12, batch_tokens=12 * MAX_LEN, train=Trained.ALL)
    assert json.loads((tmp_path / "tuned" / RECORD_FILE).read_text())["loss"] == "mlm"
    assert done.outcome.losses[-1] < done.outcome.losses[0] - 0.05
    before, after = (load_file(path / WEIGHTS) for path in (tmp_path / "mlm", tmp_path / "tuned"))
    assert set(after) == set(before)
    # Everything that the head uses; the pooler takes no part.
    kept = [
        name for name in before if before[name].shape == after[name].shape and torch.equal(before[name], after[name])
    ]
    assert all("pooler" in name for name in kept), kept
    AutoModelForMaskedLM.from_pretrained(tmp_path / "tuned")


def test_a_bundle_is_built_and_verified(run: Run, tmp_path: Path) -> None:
    done = run(attention="window:16")
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    extension = read_extension(config, tmp_path / "tuned" / "config.json")
    assert extension == done.extension
    recorded = (extension.base, extension.scheme, extension.attention, extension.tuned)
    assert recorded == (BASE, "hierarchical", "window:16", True)
    attention = attention_from_spec("window:16")
    options = BuildOptions(model=tmp_path / "tuned", output=tmp_path / "bundle", max_len=MAX_LEN, attention=attention)
    manifest = build(options)
    assert manifest.positions.attention_scale == "logn"
    assert manifest.verification is not None


_CHILD = """
import hdexport.tune.training
hdexport.tune.training._SAVE_SECONDS = 0
from pathlib import Path
from hdexport.tune.options import Loss, TuneOptions
from hdexport.tune.run import tune
tune(TuneOptions(**{options}))
"""


# Only contrast keeps something besides what all losses keep.
def test_what_is_interrupted_continues_to_the_same_bits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its third step."""
    save = training.TuneFolder.save

    def save_and_stop(folder: training.TuneFolder, reached: dict[str, Any]) -> None:
        save(folder, reached)
        if len(reached["losses"]) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "_SAVE_SECONDS", 0)
        patch.setattr(training.TuneFolder, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(loss=Loss.CONTRAST, steps=6)
    assert kept_steps(tmp_path / "tuned") == 2
    continued = run(loss=Loss.CONTRAST, steps=6)
    whole = run(loss=Loss.CONTRAST, steps=6, output=tmp_path / "whole")
    assert continued.outcome.losses == whole.outcome.losses
    one, other = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("tuned", "whole"))
    assert one == other


@pytest.mark.nightly
def test_what_is_killed_continues_to_the_same_bits(run: Run, model: Path, texts: Path, tmp_path: Path) -> None:
    loss = Loss.CONTRAST
    options = {"model": str(model), "texts": str(texts), "max_len": MAX_LEN, "batch_tokens": 600, "steps": 12}
    child_options = repr(options | {"output": "OUTPUT", "loss": "LOSS"})
    child_options = child_options.replace("'OUTPUT'", f"Path({str(tmp_path / 'tuned')!r})").replace(
        "'LOSS'", f"Loss({loss.value!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", _CHILD.format(options=child_options)])
    wait_until(lambda: (kept_steps(tmp_path / "tuned") or 0) >= 3)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (tmp_path / "tuned").exists()
    continued = run(loss=loss, steps=12)
    whole = run(loss=loss, steps=12, output=tmp_path / "whole")
    assert continued.outcome.losses == whole.outcome.losses
    one, other = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("tuned", "whole"))
    assert one == other
    assert not list(tmp_path.glob(".*"))


def test_training_that_diverges_stops_and_continues_with_a_lower_rate(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_SAVE_SECONDS", 0)
    with pytest.raises(NonFiniteOutputError, match=r"step 2: training diverged(.|\n)*kept in(.|\n)*_rate=2.5e\+37"):
        run(learning_rate=1e38)
    assert not (tmp_path / "tuned").exists()
    continued = run(learning_rate=1e-3)
    assert continued.outcome.losses == run(learning_rate=1e-3, output=tmp_path / "other").outcome.losses


def test_an_unfinished_tuning_of_other_options_is_not_continued(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_SAVE_SECONDS", 0)
    with pytest.raises(NonFiniteOutputError):
        run(learning_rate=1e38)
    with pytest.raises(InputError, match=r"seed was 0, and is 1\.\n.*restart=True"):
        run(seed=1)
    assert run(seed=1, restart=True).outcome.steps == 4


def test_options_that_do_not_fit_are_explained(run: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_len": BASE}, "max_len is 64; it must be more than the checkpoint's 64 positions"),
        ({"scheme": Scheme.GROUP}, "chooses rows by the length of each text"),
        ({"text_column": "body"}, "has no column 'body'; its columns are text"),
        ({"minutes": 0.0}, "minutes is 0.0; it must be a finite number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; it must be a finite number"),
        ({"attention": "window:0"}, "has window 0; it must be 1 or more"),
    ]
    for options, message in refused:
        with pytest.raises(HdexportError, match=message):
            pytest.fail(f"{options} gives {run(**options)}")
        assert sorted(tmp_path.iterdir()) == before, options


def test_too_few_long_texts_are_refused(run: Run, texts: Path, tmp_path: Path) -> None:
    texts_of_topics(texts, documents=5)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="holds 5 texts, and 5 of them or of their chunks have more than 64 tokens"):
        run()
    assert sorted(tmp_path.iterdir()) == before


def test_long_texts_are_cut_into_chunks(texts: Path, model: Path) -> None:
    texts_of_topics(texts, documents=4, sentences=40)
    tokenizer = AutoTokenizer.from_pretrained(model)
    corpus = read_corpus(texts, tokenizer, column=None, base=BASE, max_tokens=MAX_LEN)
    assert corpus.texts == 4
    # 40 sentences of 13 tokens each.
    assert [document.tokens for document in corpus.long[:3]] == [MAX_LEN, MAX_LEN, 520 - 2 * (MAX_LEN - 2) + 2]
    document = corpus.long[0]
    assert all(document.text[start:end].endswith("\u3002") for start, end in document.sentences)
    assert (
        document.without(document.sentences[:1])
        == document.text[: document.sentences[0][0]] + (document.text[document.sentences[0][1] :])
    )


def test_contrast_is_the_cross_entropy_of_the_right_text(model: Path, texts: Path, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(model)
    corpus = read_corpus(
        texts_of_topics(texts, documents=9), checkpoint.tokenizer, column=None, base=BASE, max_tokens=MAX_LEN
    )
    options = TuneOptions(model=model, texts=texts, output=tmp_path / "tuned", max_len=MAX_LEN)
    task = Task.SENTENCE_SIMILARITY
    choice = choose_positions(checkpoint, task=task, max_len=MAX_LEN, scheme=Scheme.TILE, attention={})
    student = make_student(checkpoint, task, options, choice, torch.device("cpu"), Progress())
    objective = Contrast(corpus, checkpoint.tokenizer, base=BASE, learns_short=False)
    objective.loss(student, [0, 1, 2, 3], seed=0)
    loss = objective.loss(student, [4, 5], seed=1)
    vectors, queries, numbers = objective.state().values()
    seen = numbers > 0
    assert seen[:9].tolist() == [True] * 6 + [False] * 3
    scores = queries[:, :, None] @ vectors[seen].T / 0.05  # [texts, queries, 1, seen]
    # The texts that were not seen look like those that were.
    weight = (len(numbers) - 1) / (int(seen.sum()) - 1)
    expected = 0.0
    for text in (4, 5):
        right = int(seen[:text].sum())
        for query in range(numbers[text]):
            odds = scores[text, query, 0].exp()
            chance = odds[right] / (odds[right] + weight * (odds.sum() - odds[right]))
            expected -= float(chance.log()) / int(numbers[text])
    assert loss.item() == pytest.approx(expected, rel=1e-4)
