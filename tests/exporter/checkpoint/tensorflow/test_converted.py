"""Checkpoints of TensorFlow and bert4keras answer as bert4keras does, and what cannot be right is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.tensorflow import convert, is_tensorflow_checkpoint
from hdexport.checkpoint.tensorflow.keras_file import google_variables, read_keras_file
from hdexport.model.task import AUTO_CLASS_OF_TASK
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, write
from support.comparators import assert_close
from support.tensor_bundles import BERT4KERAS, copied_checkpoint, rewritten, write_checkpoint
from support.tiny_models import change_json

Change = Callable[[Path], object]

ATOL = 1e-5
SCORED = 9
"""bert4keras' scores are kept for each ninth token of the vocabulary."""

TENSORFLOW = ("bert", "albert", "electra", "nezha")
KERAS = ("keras3", "roformer")
"""``hierarchical`` is asked beyond its table; the command line's tests do that."""

FAMILIES = {"keras3": "albert"}
QUERY, KEY = (f"bert/encoder/layer_0/attention/self/{name}/kernel" for name in ("query", "key"))
NORM = "bert/encoder/layer_1/output/LayerNorm"


def needs_h5py(name: str) -> Any:
    if name in (*KERAS, "hierarchical"):
        pytest.importorskip("h5py", reason="h5py, which reads Keras' files, is not installed")


def answers(checkpoint: Path, task: Task, expected: Any) -> np.ndarray:
    """Of the class that transformers loads from the converted directory, where rows are not padded."""
    model = getattr(transformers, AUTO_CLASS_OF_TASK[task]).from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.from_numpy(expected["ids"])
    with torch.no_grad():
        output = model(
            input_ids=ids, attention_mask=(ids != 0).long(), token_type_ids=torch.from_numpy(expected["segments"])
        )
    answer = output.logits[..., ::SCORED] if task is Task.FILL_MASK else output.last_hidden_state
    return answer[ids != 0].numpy()


def check(checkpoint: Path, expected: Any) -> None:
    """Compare states and, where they are kept, scores with bert4keras'."""
    real = expected["ids"] != 0
    assert_close(answers(checkpoint, Task.FEATURE_EXTRACTION, expected), expected["states"][real], atol=ATOL)
    if "scores" in expected:
        assert_close(answers(checkpoint, Task.FILL_MASK, expected), expected["scores"][real], atol=ATOL)


@pytest.mark.parametrize("name", [*TENSORFLOW, *KERAS])
def test_the_hugging_face_model_answers_as_bert4keras_does(name: str) -> None:
    needs_h5py(name)
    checkpoint = find_checkpoint(BERT4KERAS / name)
    assert checkpoint.config["model_type"] == FAMILIES.get(name, name)
    assert checkpoint.name == name
    check(checkpoint.path, np.load(BERT4KERAS / name / "expected.npz"))


def test_the_generator_of_electra_is_built_by_its_configuration(tmp_path: Path) -> None:
    directory = copied_checkpoint("electra", tmp_path)
    (directory / "small_discriminator_config.json").unlink()
    (directory / "small_generator.json").rename(directory / "small_generator_config.json")
    checkpoint = find_checkpoint(directory)
    assert checkpoint.task() is Task.FILL_MASK
    check(checkpoint.path, np.load(BERT4KERAS / "electra" / "generator.npz"))


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.update({QUERY: weights[KEY], KEY: weights[QUERY]}),
        lambda weights: weights.update({f"{NORM}/beta": weights[f"{NORM}/gamma"]}),
    ],
    ids=["query and key exchanged", "beta is gamma"],
)
def test_the_comparison_finds_wrong_weights(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    rewritten(directory, lambda weights: None)
    expected = np.load(BERT4KERAS / "bert" / "expected.npz")
    check(find_checkpoint(directory).path, expected)
    rewritten(directory, change)
    with pytest.raises(AssertionError, match=r"\d > 1e-05"):
        check(find_checkpoint(directory).path, expected)


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_texts_become_the_ids_of_bert4keras_and_of_transformers(name: str) -> None:
    tokenizer = find_checkpoint(BERT4KERAS / name).tokenizer
    (vocabulary,) = (BERT4KERAS / name).glob("vocab*.txt")
    library = transformers.BertTokenizer.from_pretrained(find_checkpoint(BERT4KERAS / "bert").path, do_lower_case=True)
    assert library.get_vocab() == {token: index for index, token in enumerate(vocabulary.read_text().splitlines())}
    texts = json.loads((BERT4KERAS / "texts.json").read_text(encoding="utf-8"))
    assert len(texts) == 5
    for text in texts:
        assert tokenizer(text["text"])["input_ids"] == text["ids"] == library(text["text"])["input_ids"], text


def test_capital_letters_in_the_vocabulary_are_kept_unless_a_file_says_otherwise(tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    vocabulary = directory / "vocab.txt"
    lowercased = find_checkpoint(directory)
    assert any("has no capital letter, so texts are lowercased" in line for line in lowercased.remarks)
    # With Windows' ends of lines and a byte order mark, which editors add.
    text = vocabulary.read_text(encoding="utf-8").replace("[unused1]", "A")
    vocabulary.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    cased = find_checkpoint(directory)
    assert any("has capital letters, so texts keep theirs" in line for line in cased.remarks)
    assert cased.tokenizer("A a")["input_ids"] == [3, 1, lowercased.tokenizer("a")["input_ids"][1], 4]
    (directory / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    told = find_checkpoint(directory)
    assert not any("capital" in line for line in told.remarks)
    assert told.tokenizer("A")["input_ids"] == told.tokenizer("a")["input_ids"]


def test_a_classifier_of_google_is_one_of_hugging_face(tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    added = {"output_weights": np.ones((5, 16), np.float32), "output_bias": np.arange(5, dtype=np.float32)}

    def change(weights: dict[str, np.ndarray]) -> None:
        for name in [name for name in weights if name.startswith("cls/")]:
            del weights[name]
        weights.update(added)

    rewritten(directory, change)
    checkpoint = find_checkpoint(directory)
    assert checkpoint.task() is Task.TEXT_CLASSIFICATION
    model = checkpoint.load(Task.TEXT_CLASSIFICATION)
    assert model.config.num_labels == 5
    np.testing.assert_array_equal(model.classifier.bias.detach().numpy(), added["output_bias"])


def test_a_roformer_of_tensorflow_is_told_by_its_configuration(tmp_path: Path) -> None:
    needs_h5py("roformer")
    layers = read_keras_file(BERT4KERAS / "roformer" / "best_model.weights").named
    variables, others = google_variables(layers, model_type="roformer")
    assert others == []
    directory = copied_checkpoint("roformer", tmp_path)
    (directory / "best_model.weights").unlink()
    write_checkpoint(directory / "model.ckpt", variables)
    with pytest.raises(ModelError, match="is a NEZHA or a RoFormer"):
        find_checkpoint(directory)
    change_json(directory / "bert_config.json", model_type="roformer")
    check(find_checkpoint(directory).path, np.load(BERT4KERAS / "roformer" / "expected.npz"))


def test_a_directory_with_hugging_face_weights_is_not_converted(tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    before = find_checkpoint(directory).path
    for file in before.iterdir():
        shutil.copyfile(file, directory / file.name)
    assert not is_tensorflow_checkpoint(directory)
    checkpoint = find_checkpoint(directory)
    assert checkpoint.path == checkpoint.origin == directory.resolve()
    assert checkpoint.remarks == ()


def test_the_converted_directory_lasts_as_long_as_it_is_used(tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    checkpoint = find_checkpoint(directory)
    assert find_checkpoint(directory).path == checkpoint.path != checkpoint.origin == directory.resolve()
    # What another checkpoint is converted to takes its place among the commands' own.
    convert(BERT4KERAS / "albert")
    assert (checkpoint.path / "model.safetensors").is_file()
    path = checkpoint.path
    del checkpoint
    assert not path.exists()


def test_a_changed_checkpoint_is_converted_again(tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    before = find_checkpoint(directory)
    rewritten(directory, lambda weights: weights["bert/embeddings/LayerNorm/beta"].fill(3))
    after = load_file(find_checkpoint(directory).path / "model.safetensors")
    assert (after["bert.embeddings.LayerNorm.bias"] == 3).all()
    assert not (load_file(before.path / "model.safetensors")["bert.embeddings.LayerNorm.bias"] == 3).any()


def config(**changes: object) -> Change:
    return lambda directory: change_json(next(directory.glob("*_config.json")), **changes)


def weights(change: Callable[[dict[str, np.ndarray]], object]) -> Change:
    return lambda directory: rewritten(directory, change)


def named(name: str, content: str = "{}") -> Change:
    return lambda directory: (directory / name).write_text(content)


def second_checkpoint(record: str | None) -> Change:
    def change(directory: Path) -> None:
        for file in sorted(directory.glob("bert_model.ckpt.*")):
            shutil.copyfile(file, directory / file.name.replace("bert_model", "older"))
        if record is not None:
            (directory / "checkpoint").write_text(record)

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", weights(lambda all_: all_.pop(QUERY)), rf"ckpt.index lacks '{QUERY}', which a BertForMaskedLM needs"),
        (
            "bert",
            weights(lambda all_: all_.update({QUERY: np.zeros((16, 8), np.float32)})),
            rf"has {QUERY} of shape \[16, 8\], and bert_config.json makes it \[16, 16\] \(hidden_size 16\)",
        ),
        ("bert", config(num_hidden_layers=1), r"bert_config.json has num_hidden_layers 1, and .*ckpt.index has 2"),
        ("bert", config(hidden_size=None), r"bert_config.json has no hidden_size; it must be a whole number"),
        ("bert", config(keep_tokens=[1]), "has keep_tokens: a part of the vocabulary"),
        ("nezha", config(use_relative_position=False), r"is a NEZHA or a RoFormer.*\nAdd .*\"model_type\": \"nezha\""),
        ("bert", lambda path: (path / "bert_config.json").unlink(), "holds bert_model.ckpt.index and no configuration"),
        (
            "electra",
            lambda path: (path / "small_generator.json").rename(path / "small_generator_config.json"),
            r"several configurations, and they differ: small_discriminator_config.json, small_generator_config.json",
        ),
        (
            "bert",
            lambda path: [file.unlink() for file in path.glob("bert_model*")],
            r"holds bert_config.json and no weights.\nIt needs a TensorFlow checkpoint",
        ),
        (
            "bert",
            second_checkpoint(None),
            r"several checkpoints: bert_model.ckpt.index, older.ckpt.index.\n.*model_checkpoint_path: \"older.ckpt\"",
        ),
        (
            "bert",
            lambda path: [[file.unlink() for file in path.glob("bert_model*")], (path / "tf_model.h5").touch()],
            "tf_model.h5 holds the weights of a TensorFlow class of transformers, which is not read",
        ),
        ("bert", named("vocab.txt", "a\nb\n"), r"vocab.txt has no \[UNK\], \[CLS\], \[SEP\], \[PAD\], \[MASK\]"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path, name: str, change: Change, message: str) -> None:
    directory = copied_checkpoint(name, tmp_path)
    change(directory)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ModelError, match=message):
        find_checkpoint(directory)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_file_checkpoint_names_the_latest_of_several(tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    second_checkpoint('model_checkpoint_path: "/moved/since/older.ckpt"\nall_model_checkpoint_paths: "a"\n')(directory)
    assert "Read older.ckpt.index and bert_config.json as BertForMaskedLM." in find_checkpoint(directory).remarks


def english_albert(directory: Path) -> Path:
    """An ALBERT whose tokenizer is a SentencePiece model."""
    copy = copied_checkpoint("albert", directory)
    (copy / "vocab_chinese.txt").unlink()
    assert find_checkpoint(copy).tokenizer is None
    shutil.copyfile(BERT4KERAS / "sentence_piece" / "30k-clean.model", copy / "30k-clean.model")
    return copy


def test_texts_of_an_english_albert_become_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(english_albert(tmp_path))
    assert any("Texts are lowercased, as for ALBERT" in line for line in checkpoint.remarks)
    texts = json.loads((BERT4KERAS / "sentence_piece" / "texts.json").read_text(encoding="utf-8"))
    assert len(texts) == 9
    for text in texts:
        assert checkpoint.tokenizer(text["text"])["input_ids"] == text["ids"], text
    assert checkpoint.tokenizer("a", "b")["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", "cannot be read as a SentencePiece model"),
        (b"\x0a\x09\x0a\x05<unk>\x18\x02", r"has no \[CLS\], \[SEP\], \[MASK\], <pad>"),
        (
            b"\x0a\x09\x0a\x05<unk>\x18\x02\x12\x02\x18\x02",
            r"is a .* of the algorithm 2; ALBERT's are unigram models \(1\)",
        ),
    ],
)
def test_what_is_no_sentencepiece_model_of_albert_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    directory = english_albert(tmp_path)
    (directory / "30k-clean.model").write_bytes(content)
    with pytest.raises(ModelError, match=f"30k-clean.model {message}"):
        find_checkpoint(directory)


def test_a_full_disk_for_temporary_files_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copied_checkpoint("bert", tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(ModelError, match=r"has no space for the checkpoint .*\n.*set TMPDIR"):
        find_checkpoint(directory)


def test_positions_of_the_configuration_are_chosen_with_their_alpha(tmp_path: Path) -> None:
    from hdexport.checkpoint.position_choice import choose_positions
    from hdruntime.bundle.manifest import Scheme

    def choice(checkpoint: Checkpoint, **options: Any) -> tuple[float, str, str]:
        chosen = choose_positions(
            checkpoint,
            task=Task.FEATURE_EXTRACTION,
            max_len=options.pop("max_len", 60),
            scheme=options.pop("scheme", Scheme.HIERARCHICAL),
            attention={},
            **options,
        )
        return chosen.alpha, chosen.attention_scale, write(chosen.remark)

    directory = copied_checkpoint("bert", tmp_path)
    assert choice(find_checkpoint(directory))[1:] == ("logn", "")
    for value, alpha in ((True, 0.4), (0.3, 0.3)):
        change_json(directory / "bert_config.json", hierarchical_position=value)
        checkpoint = find_checkpoint(directory)
        said = rf"hierarchical_position of the configuration (alpha {alpha})"
        assert choice(checkpoint) == (alpha, "none", f"Positions: hierarchical, as {said} says.")
        assert choice(checkpoint, alpha=0.2) == (0.2, "none", f"Positions: alpha=0.2 overrules {said}.")
        assert choice(checkpoint, scheme=Scheme.TILE)[2] == f"Positions: scheme='tile' overrules {said}."
        assert choice(checkpoint, max_len=24)[2] == ""
    change_json(directory / "bert_config.json", hierarchical_position=False)
    assert choice(find_checkpoint(directory))[1:] == ("logn", "")
