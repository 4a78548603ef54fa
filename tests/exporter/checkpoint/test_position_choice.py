"""What a build takes where positions and the attention scale are left open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdexport.attention.registry import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.extended_files import EXTENSION_KEY
from hdexport.checkpoint.position_choice import PositionChoice, choose_positions
from hdexport.extend import ExtendOptions, extend
from hdruntime.bundle.manifest import Scheme, Task
from hdruntime.errors import ExportError, InputError, ModelError, write
from support.tiny_models import BASE, save_tiny_model

FINE_TUNED = "before fine-tuning: alpha=0.4 attention_scale='none'"


def chosen(directory: Path, task: str = "feature-extraction", *, max_len: int = 300, **options) -> PositionChoice:
    options = {"scheme": Scheme.HIERARCHICAL, "attention": {}, **options}
    return choose_positions(find_checkpoint(directory), task=Task(task), max_len=max_len, **options)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "bert", "bert", Task.FEATURE_EXTRACTION)
    return tmp_path / "bert"


@pytest.mark.parametrize(
    ("model_type", "task", "alpha", "scale"),
    [
        ("bert", "feature-extraction", 0.05, "logn"),
        ("longformer", "feature-extraction", 0.05, "none"),
        ("modernbert", "feature-extraction", 0.4, "none"),
    ],
)
def test_models_and_tasks_decide(tmp_path: Path, model_type: str, task: str, alpha: float, scale: str) -> None:
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    choice = chosen(tmp_path, task, max_len=4000 if model_type == "modernbert" else 300)
    assert (choice.alpha, choice.attention_scale) == (alpha, scale)
    assert choice.reason
    assert choice.trained == find_checkpoint(tmp_path).base_positions


def test_the_line_names_the_other_choice_by_its_options(bert: Path) -> None:
    choice = chosen(bert)
    assert choice.describe() == "hierarchical, alpha 0.05, queries scaled by log n"
    assert write(choice.force) == FINE_TUNED
    assert write(chosen(bert, "fill-mask").force) == "without fine-tuning: alpha=0.05 attention_scale='logn'"
    assert write(chosen(bert, scheme=Scheme.TILE).force) == "before fine-tuning: attention_scale='none'"


@pytest.mark.parametrize(
    ("options", "alpha", "scale"),
    [
        ({"alpha": 0.2}, 0.2, "logn"),
        ({"attention_scale": "none"}, 0.05, "none"),
        ({"alpha": 0.4, "attention_scale": "none"}, 0.4, "none"),
    ],
)
def test_an_option_wins_and_the_rest_is_chosen(bert: Path, options, alpha: float, scale: str) -> None:
    choice = chosen(bert, **options)
    assert (choice.alpha, choice.attention_scale) == (alpha, scale)
    assert (choice.reason, choice.force) == ("as the options say", "")


def test_up_to_the_checkpoints_positions_there_is_nothing_to_choose(bert: Path) -> None:
    choice = chosen(bert, max_len=BASE)
    assert (choice.attention_scale, choice.force) == ("none", "")
    assert choice.reason == f"the checkpoint has {BASE} positions"


def test_an_extended_checkpoint_is_used_as_it_was_made(bert: Path, tmp_path: Path) -> None:
    extend(ExtendOptions(model=bert, output=tmp_path / "longer", max_len=300))
    choice = chosen(tmp_path / "longer")
    assert (choice.attention_scale, choice.trained, choice.force) == ("none", BASE, "")
    assert choice.reason == "the checkpoint's 300 positions are used as hdexport extend wrote them"
    further = chosen(tmp_path / "longer", max_len=600)
    assert (further.alpha, further.attention_scale, further.trained) == (0.4, "none", BASE)


def test_a_tuned_checkpoint_is_scaled_as_in_its_training(bert: Path) -> None:
    record = {"base": 16, "scheme": "hierarchical", "alpha": 0.1, "attention_scale": "logn", "tuned": True}
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, EXTENSION_KEY: record}))
    choice = chosen(bert, max_len=BASE)
    assert (choice.attention_scale, choice.trained) == ("logn", 16)
    assert choice.reason == f"the checkpoint's {BASE} positions are used as hdexport tune wrote them"
    assert chosen(bert, max_len=2 * BASE).alpha == 0.1


@pytest.mark.parametrize(("spec", "warns"), [(None, True), ("window:16", False)])
def test_a_build_without_the_attention_of_the_tuning_says_so(
    bert: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spec: str | None,
    warns: bool,
) -> None:
    """Before the model is traced, which is left out here."""

    def stop(*_: object, **__: object) -> None:
        raise ExportError("the trace begins")

    monkeypatch.setattr("hdexport.graph.tracing.trace", stop)
    record = {"base": 16, "scheme": "tile", "attention": "window:16", "tuned": True}
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, EXTENSION_KEY: record}))
    attention = attention_from_spec(spec)
    with pytest.raises(ExportError, match="the trace begins"):
        build(BuildOptions(model=bert, output=tmp_path / "bundle", max_len=BASE, attention=attention, verify=None))
    assert ("were tuned with attention='window:16'" in caplog.text) == warns


def test_a_malformed_record_and_a_length_that_does_not_fit_are_refused(bert: Path) -> None:
    with pytest.raises(InputError, match="4097 is above 4096"):
        chosen(bert, max_len=4097)
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, EXTENSION_KEY: {"base": 0}}))
    with pytest.raises(ModelError, match=r'malformed record of its extension: .*base(.|\n)*Remove "hdexport"'):
        chosen(bert)
