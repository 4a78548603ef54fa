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
from hdexport.checkpoint.foreign import convert, is_foreign
from hdexport.checkpoint.foreign.bert4keras_layers import google_variables
from hdexport.checkpoint.foreign.keras_file import read_keras_file
from hdexport.model.tasks import AUTO_CLASS_OF_TASK, Task
from hdruntime.errors import ModelError
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
            input_ids=ids,
            attention_mask=(ids != 0).long(),
            token_type_ids=torch.from_numpy(expected["segments"]),
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


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_the_pooler_answers_as_bert4keras_does(name: str) -> None:
    expected = np.load(BERT4KERAS / name / "expected.npz")
    model = transformers.AutoModel.from_pretrained(find_checkpoint(BERT4KERAS / name).path).eval()
    ids = torch.from_numpy(expected["ids"])
    with torch.no_grad():
        pooled = model(ids, (ids != 0).long(), torch.from_numpy(expected["segments"])).pooler_output
    assert_close(pooled.numpy(), expected["pooled"], atol=ATOL)


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


def test_a_vocabulary_of_words_is_remarked_for_roformer(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="h5py, which reads Keras' files, is not installed")
    directory = copied_checkpoint("roformer", tmp_path)
    vocabulary = (directory / "vocab.txt").read_text(encoding="utf-8")
    (directory / "vocab.txt").write_text(vocabulary.replace("[unused1]", "模型"), encoding="utf-8")
    (remark,) = (line for line in find_checkpoint(directory).remarks if "jieba" in line)
    assert "splits Chinese into characters" in remark


def test_what_training_keeps_is_ignored_and_what_else_is_left_out_is_said(tmp_path: Path) -> None:
    assert not any("left out" in line for line in find_checkpoint(BERT4KERAS / "bert").remarks)
    (line,) = (line for line in find_checkpoint(BERT4KERAS / "electra").remarks if "left out" in line)
    assert "'generator/embeddings_project/bias'" in line


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


def test_albert_without_a_projection_has_one_that_changes_nothing(tmp_path: Path) -> None:
    directory = copied_checkpoint("albert", tmp_path)
    change_json(directory / "albert_config.json", embedding_size=16)
    mapping = "bert/encoder/embedding_hidden_mapping_in"

    def change(weights: dict[str, np.ndarray]) -> None:
        for name in [name for name in weights if name.startswith(("cls/", mapping))]:
            del weights[name]
        for name in [name for name in weights if name.startswith("bert/embeddings/")]:
            weights[name] = np.ones((*weights[name].shape[:-1], 16), np.float32)

    rewritten(directory, change)
    weights = load_file(find_checkpoint(directory).path / "model.safetensors")
    assert torch.equal(weights["albert.encoder.embedding_hidden_mapping_in.weight"], torch.eye(16))
    assert not weights["albert.encoder.embedding_hidden_mapping_in.bias"].any()


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
    assert not is_foreign(directory)
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
        ("bert", weights(lambda all_: all_.pop("cls/predictions/output_bias")), "lacks 'cls/predictions/output_bias'"),
        (
            "bert",
            weights(lambda all_: all_.update({QUERY: np.zeros((16, 8), np.float32)})),
            rf"has {QUERY} of shape \[16, 8\], and bert_config.json makes it \[16, 16\] \(hidden_size 16\)",
        ),
        (
            "bert",
            config(vocab_size=50),
            r"word_embeddings of shape \[112, 16\], and .* makes it \[50, 16\] \(vocab_size 50, hidden_size 16\)",
        ),
        ("bert", config(num_hidden_layers=1), r"bert_config.json has num_hidden_layers 1, and .*ckpt.index has 2"),
        ("bert", config(num_hidden_layers=3), r"lacks 'bert/encoder/layer_2/attention/self/query/kernel'"),
        (
            "bert",
            weights(lambda all_: all_.update({QUERY: np.zeros((16, 16), np.int64)})),
            f"stores {QUERY} as something else than floating-point numbers",
        ),
        ("bert", config(hidden_size=None), r"bert_config.json has no hidden_size; it must be a whole number"),
        ("bert", config(hidden_size=True), "has hidden_size True; it must be a whole number"),
        ("bert", config(num_hidden_layers=9999), "has num_hidden_layers 9999; the most is 1024"),
        ("bert", config(segment_vocab_size=0), "has type_vocab_size 0; it must be"),
        ("bert", config(max_position=99), r"position_embeddings of shape \[24, 16\], and .* makes it \[99, 16\]"),
        ("bert", config(embedding_size=8), "embedding_size 8 and hidden_size 16; a bert .* as wide as its layers"),
        ("bert", config(attention_key_size=3), r"attention_key_size 3; a bert .* hidden_size / .* = 8"),
        ("bert", config(keep_tokens=[1]), "has keep_tokens: a part of the vocabulary"),
        ("bert", config(model_type="gpt2"), "model_type 'gpt2'; .* are read of albert, bert, electra, nezha, roformer"),
        ("bert", config(hierarchical_position="yes"), "hierarchical_position 'yes'; it is true, for an alpha of 0.4"),
        ("bert", config(hierarchical_position=0.5), "between 0 and 1 other than 0.5"),
        ("nezha", config(use_relative_position=False), r"is a NEZHA or a RoFormer.*\nAdd .*\"model_type\": \"nezha\""),
        (
            "bert",
            weights(lambda all_: [all_.clear(), all_.update(other=np.zeros(1, np.float32))]),
            r"of no family that is known by its names \('other'\)",
        ),
        ("bert", named("bert_config.json", "{"), "bert_config.json cannot be read"),
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
        ("bert", named("model.h5"), r"of TensorFlow \(bert_model.ckpt.index\) and of Keras \(model.h5\).*\nLeave one"),
        (
            "bert",
            second_checkpoint(None),
            r"several checkpoints: bert_model.ckpt.index, older.ckpt.index.\n.*model_checkpoint_path: \"older.ckpt\"",
        ),
        (
            "bert",
            second_checkpoint('model_checkpoint_path: "gone"'),
            "checkpoint names 'gone', and .* holds bert_model",
        ),
        ("bert", second_checkpoint("nothing"), "checkpoint names none, and"),
        (
            "bert",
            lambda path: [[file.unlink() for file in path.glob("bert_model*")], (path / "tf_model.h5").touch()],
            "tf_model.h5 holds the weights of a TensorFlow class of transformers, which is not read",
        ),
        ("bert", named("vocab.txt", "a\nb\n"), r"vocab.txt has no \[UNK\], \[CLS\], \[SEP\], \[PAD\], \[MASK\]"),
        ("bert", lambda path: (path / "vocab.txt").write_bytes(b"\xff\xfe"), "vocab.txt cannot be read"),
        ("albert", named("vocab_2.txt"), "holds several vocabularies: vocab_2.txt, vocab_chinese.txt"),
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


def test_a_directory_of_nothing_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json, so it is not a Hugging Face checkpoint"):
        find_checkpoint(tmp_path)


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


def test_capital_letters_of_an_english_albert_are_kept_where_a_file_says_so(tmp_path: Path) -> None:
    directory = english_albert(tmp_path)
    (directory / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    checkpoint = find_checkpoint(directory)
    assert not any("lowercased" in line for line in checkpoint.remarks)
    tokenizer = checkpoint.tokenizer
    assert tokenizer("JAG")["input_ids"] != tokenizer("jag")["input_ids"]
    assert tokenizer.unk_token_id in tokenizer("JAG")["input_ids"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", "cannot be read as a SentencePiece model"),
        (b"", "cannot be read as a SentencePiece model: it has no piece for unknown text"),
        (b"\x0a\x08\x0a\x01\xff\x15\0\0\0\0", "cannot be read as a SentencePiece model"),
        (b"\x0a\x07\x0a\x05<unk>\x18\x02", "cannot be read as a SentencePiece model"),
        (b"\x0a\x09\x0a\x05<unk>\x10\xff\xff\xff\xff\x7f", "cannot be read as a SentencePiece model"),
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


def test_a_damaged_map_of_characters_is_refused(tmp_path: Path) -> None:
    directory = english_albert(tmp_path)
    model = directory / "30k-clean.model"
    # Another field of the same number counts more than the first.
    model.write_bytes(model.read_bytes() + b"\x1a\x05\x12\x03\xff\xff\xff")
    with pytest.raises(ModelError, match=r"30k-clean.model cannot be read as a SentencePiece model"):
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
    from hdexport.model.positions import Scheme

    def choice(checkpoint: Checkpoint, **options: Any) -> tuple[float, str, str]:
        chosen = choose_positions(
            checkpoint,
            task=Task.FEATURE_EXTRACTION,
            max_len=options.pop("max_len", 60),
            scheme=options.pop("scheme", Scheme.HIERARCHICAL),
            attention={},
            **options,
        )
        return chosen.alpha, chosen.attention_scale, chosen.remark

    directory = copied_checkpoint("bert", tmp_path)
    assert choice(find_checkpoint(directory))[1:] == ("logn", "")
    for value, alpha in ((True, 0.4), (0.3, 0.3)):
        change_json(directory / "bert_config.json", hierarchical_position=value)
        checkpoint = find_checkpoint(directory)
        said = rf"hierarchical_position of the configuration (alpha {alpha})"
        assert choice(checkpoint) == (alpha, "none", f"Positions: hierarchical, as {said} says.")
        assert choice(checkpoint, alpha=0.2) == (0.2, "none", f"Positions: --alpha 0.2 overrules {said}.")
        assert choice(checkpoint, scheme=Scheme.TILE)[2] == f"Positions: --positions tile overrules {said}."
        assert choice(checkpoint, max_len=24)[2] == ""
    change_json(directory / "bert_config.json", hierarchical_position=False)
    assert choice(find_checkpoint(directory))[1:] == ("logn", "")


def test_every_checkpoint_here_is_tested() -> None:
    folders = {path.name for path in BERT4KERAS.iterdir() if path.is_dir()}
    assert folders == {*TENSORFLOW, *KERAS, "hierarchical", "sentence_piece", "types"}


def test_weights_that_others_wrote_stay_as_they_are(tmp_path: Path) -> None:
    """A conversion of float16 stays float16, bit by bit."""
    directory = copied_checkpoint("bert", tmp_path)
    rewritten(directory, lambda all_: all_.update({QUERY: all_[QUERY].astype(np.float16)}))
    (index,) = directory.glob("*.index")
    from hdexport.checkpoint.foreign.tensor_bundle import TensorBundle

    stored = TensorBundle(index).read(QUERY)
    converted = load_file(find_checkpoint(directory).path / "model.safetensors")
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert converted[name].dtype == torch.float16
    np.testing.assert_array_equal(converted[name].numpy(), stored.T)
