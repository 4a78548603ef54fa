"""Tiny checkpoints that TensorFlow and bert4keras wrote, and what bert4keras answers.

Run once, in an environment of its own, with Python 3.11, bert4keras 0.11.5, tensorflow-cpu 2.21.0, tf-keras 2.21.0,
h5py 3.14.0 and sentencepiece 0.2.3; bert4keras itself is on PYTHONPATH, because it asks for a Keras that no longer
installs::

    python -m venv tensorflow2
    tensorflow2/bin/pip install tensorflow-cpu==2.21.0 tf-keras==2.21.0 h5py==3.14.0 sentencepiece==0.2.3
    tensorflow2/bin/pip download --no-deps --no-binary :all: bert4keras==0.11.5
    tar xf bert4keras-0.11.5.tar.gz
    PYTHONPATH=bert4keras-0.11.5 tensorflow2/bin/python tests/data/bert4keras/make.py

Each folder beside this file is a checkpoint as its users have it, with ``expected.npz``: ``ids`` [3, tokens], 0 where a
row is padded; ``segments`` [3, tokens]; ``states`` [3, tokens, hidden_size]; where the model has the head, ``scores``
[3, tokens, each ninth id] of masked tokens, before any softmax; and ``pooled`` [3, hidden_size]. ``texts.json`` holds
texts with the ids of bert4keras' tokenizer. ``types`` is a checkpoint of every type, for the reader alone, and
``sentence_piece`` a tokenizer of English ALBERT with its ids.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"TF_KERAS": "1", "TF_USE_LEGACY_KERAS": "1", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import tensorflow as tf
import tf_keras

# bert4keras asks for the module, which is a lazy one in this version and fails on `import keras.backend`.
tf.keras = tf_keras

from bert4keras.models import build_transformer_model  # noqa: E402
from bert4keras.tokenizers import Tokenizer  # noqa: E402

HERE = Path(__file__).parent
TEXTS = [
    "使用语言模型来预测下一个词的probability。",
    "Hello, WORLD! naïve café",
    "长文本long text，中英mixed混排：abc123、x=1。",  # noqa: RUF001
    "unknown 龘 ☃ tabs\tand\u3000spaces",
    "",
]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
}
SLOTS = ("adam_m", "adam_v")
SCORED = 9
"""Of so many tokens of the vocabulary, one's scores are kept."""


def vocabulary() -> list[str]:
    """Special tokens, letters, digits, punctuation and the characters of the texts, few of them missing."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    characters = sorted({character for text in TEXTS for character in text if "一" <= character <= "鿿"} - {"龘"})
    return [
        *("[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "long", "##bab", "##il"),
        *letters,
        *(f"##{letter}" for letter in letters),
        *map(str, range(10)),
        *(f"##{digit}" for digit in range(10)),
        *"!,.:=、。，：",  # noqa: RUF001
        *characters,
    ]


def config_of(**changes: Any) -> dict[str, Any]:
    return SIZES | {"vocab_size": len(vocabulary())} | changes


def with_random_weights(transformer: Any, seed: int) -> Any:
    """The same transformer, with weights that make attention far from uniform."""
    random = np.random.default_rng(seed)
    for layer in transformer.model.layers:
        if not layer.trainable:
            continue
        values = []
        for weight in layer.weights:
            # Gamma is around 1; K.epsilon() is small beside the variances.
            mean = 1.0 if "gamma" in weight.name else 0.0
            values.append(random.normal(mean, 0.15 if len(weight.shape) == 1 else 0.3, weight.shape))
        layer.set_weights(values)
    return transformer


def made(seed: int, config: dict[str, Any], model: str, **options: Any) -> Any:
    keys = {key: value for key, value in config.items() if key not in ("use_relative_position",)}
    return with_random_weights(
        build_transformer_model(None, None, model, return_keras_model=False, **keys, **options), seed
    )


def variables_of(transformer: Any) -> dict[str, np.ndarray]:
    """Name in Google's checkpoints -> value."""
    variables = {}
    for name, names in transformer.variable_mapping().items():
        if name in transformer.layers:
            values = transformer.layers[name].get_weights()
            variables |= dict(zip(names, values, strict=True))
    if (name := "cls/seq_relationship/output_weights") in variables:
        variables[name] = variables[name].T
    return variables


def save_checkpoint(prefix: Path, variables: dict[str, np.ndarray], *, shards: int = 1, slots: bool = True) -> None:
    """Write a checkpoint of variables, as TensorFlow 1's Saver does, with what an optimizer leaves."""
    if slots:
        slotted = {name: value for name, value in variables.items() if name.endswith("bias")}
        variables = variables | {f"{name}/{slot}": value for name, value in slotted.items() for slot in SLOTS}
        variables["global_step"] = np.array(7, np.int64)
    names = sorted(variables)
    parts = [f"{prefix}_part-{shard:05}-of-{shards:05}" for shard in range(shards)]
    for shard, part in enumerate(parts):
        chosen = names[shard::shards]
        tf.raw_ops.SaveV2(
            prefix=part,
            tensor_names=chosen,
            shape_and_slices=[""] * len(chosen),
            tensors=[tf.constant(variables[name]) for name in chosen],
        )
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(prefix), delete_old_dirs=False)


def inputs(tokens: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Three rows of ids, of `tokens`, of 5, and of two thirds, padded on the right; and their segments."""
    random = np.random.default_rng(tokens)
    ids = random.integers(6, vocab_size, (3, tokens))
    segments = (np.arange(tokens)[None] >= np.array([[tokens // 2], [3], [tokens]])).astype(np.int64)
    for row, length in enumerate((tokens, 5, 2 * tokens // 3)):
        ids[row, length:] = 0
        segments[row, length:] = 0
    return ids, segments


def save_answers(
    folder: Path, tokens: int, transformer: Any, **others: Callable[[list[np.ndarray]], np.ndarray]
) -> None:
    ids, segments = inputs(tokens, transformer.vocab_size)
    last = f"Transformer-{transformer.num_hidden_layers - 1}-FeedForward-Norm"
    shared = "Transformer-FeedForward-Norm"
    layer = transformer.layers.get(last) or transformer.layers[shared]
    states = tf_keras.models.Model(transformer.model.inputs, layer.get_output_at(-1)).predict(
        [ids, segments], verbose=0
    )
    answers = {name: answer([ids, segments]) for name, answer in others.items()}
    if "scores" in answers:
        answers["scores"] = answers["scores"][..., ::SCORED]
    np.savez_compressed(folder / "expected.npz", ids=ids, segments=segments, states=states, **answers)


def started(
    name: str,
    config: dict[str, Any] | None,
    *,
    config_file: str = "bert_config.json",
    vocabulary_file: str = "vocab.txt",
) -> Path:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if config is not None:
        (folder / config_file).write_text(json.dumps(config, indent=2) + "\n")
        (folder / vocabulary_file).write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    return folder


def heads(transformer: Any) -> dict[str, Callable[[list[np.ndarray]], np.ndarray]]:
    """The answers of a model with a pooler and the head for masked tokens, which is linear here."""
    return {
        "scores": lambda values: transformer.model.predict(values, verbose=0)[1],
        "pooled": lambda values: tf_keras.models.Model(
            transformer.model.inputs, transformer.layers["Pooler-Dense"].output
        ).predict(values, verbose=0),
    }


def scores(transformer: Any) -> dict[str, Callable[[list[np.ndarray]], np.ndarray]]:
    return {"scores": lambda values: transformer.model.predict(values, verbose=0)}


def make_bert() -> None:
    """Google's layout, with every head and an optimizer's slots."""
    config = config_of()
    folder = started("bert", config)
    transformer = made(1, config, "bert", with_mlm="linear", with_nsp=True)
    save_checkpoint(folder / "bert_model.ckpt", variables_of(transformer))
    save_answers(folder, 20, transformer, **heads(transformer))


def make_albert() -> None:
    """Google's Chinese layout, in two data files."""
    config = config_of(embedding_size=12, num_hidden_groups=1, inner_group_num=1, num_hidden_layers=3)
    folder = started("albert", config, config_file="albert_config.json", vocabulary_file="vocab_chinese.txt")
    # What Google's ALBERT computes where its configuration says "gelu".
    transformer = made(2, config | {"hidden_act": "gelu_tanh"}, "albert", with_mlm="linear", with_pool=True)
    variables = variables_of(transformer)
    save_checkpoint(folder / "model.ckpt-best", variables, shards=2, slots=False)
    save_answers(folder, 20, transformer, **heads(transformer))


def make_electra() -> None:
    """Both models in one checkpoint, the generator with the discriminator's embeddings."""
    config = config_of(embedding_size=12)
    folder = started("electra", config, config_file="small_discriminator_config.json")
    discriminator = made(3, config, "electra", with_discriminator=True)
    small = config | {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 16}
    generator = made(4, small, "bert", with_mlm="linear")
    for name in ("Embedding-Token", "Embedding-Segment", "Embedding-Position", "Embedding-Norm"):
        generator.layers[name].set_weights(discriminator.layers[name].get_weights())
    others = {
        "bert/encoder/embedding_hidden_mapping_in": "generator/embeddings_project",
        "bert/encoder": "generator/encoder",
        "cls/predictions/transform/": "generator_predictions/",
        "cls/predictions/": "generator_predictions/",
    }
    variables = variables_of(discriminator)
    for name, value in variables_of(generator).items():
        for before, after in others.items():
            if name.startswith(before):
                variables[name.replace(before, after)] = value
                break
    save_checkpoint(folder / "electra_small.ckpt", variables, slots=False)
    (folder / "small_generator.json").write_text(json.dumps(small, indent=2) + "\n")
    save_answers(folder, 20, discriminator)
    shutil.move(folder / "expected.npz", folder / "discriminator.npz")
    save_answers(folder, 20, generator, **scores(generator))
    shutil.move(folder / "expected.npz", folder / "generator.npz")
    shutil.move(folder / "discriminator.npz", folder / "expected.npz")


def make_nezha() -> None:
    """A checkpoint of names, without positions, whose configuration has Huawei's key."""
    config = config_of(use_relative_position=True, max_position_embeddings=512)
    folder = started("nezha", config)
    # bert4keras' small number in norms is not Huawei's; weights this large hide the difference.
    transformer = made(5, config, "nezha", with_mlm="linear")
    save_checkpoint(folder / "model.ckpt", variables_of(transformer), slots=False)
    save_answers(folder, 90, transformer, **scores(transformer))


def make_roformer() -> None:
    """HDF5, in which a layer without weights tells the rotary positions."""
    config = config_of(max_position_embeddings=512)
    folder = started("roformer", config)
    transformer = made(6, config, "roformer", with_mlm="linear")
    transformer.model.save_weights(folder / "best_model.weights", save_format="h5")
    save_answers(folder, 40, transformer, **scores(transformer))


def make_hierarchical() -> None:
    """HDF5 of a BERT whose positions are decomposed, asked beyond its table."""
    config = config_of(hierarchical_position=True)
    folder = started("hierarchical", config)
    transformer = made(7, config, "bert", with_mlm="linear", with_pool=True)
    transformer.model.save_weights(folder / "best_model.h5")
    save_answers(folder, 50, transformer, **heads(transformer))


def make_keras_3() -> None:
    """HDF5 as Keras writes it for this suffix since 2.12: layers by their class, not their name."""
    config = config_of(embedding_size=12)
    folder = started("keras3", config)
    transformer = made(8, config, "albert", with_mlm="linear", with_pool=True)
    transformer.model.save_weights(folder / "best_model.weights.h5")
    save_answers(folder, 20, transformer, **heads(transformer))


def make_types() -> None:
    """Every type that is read, one that is not, and a variable in two slices."""
    folder = started("types", None)
    values = np.linspace(-3, 3, 12).reshape(3, 4)
    tensors: dict[str, Any] = {
        "bfloat16": tf.cast(values, tf.bfloat16),
        "empty": tf.zeros((0, 4)),
        "float16": tf.cast(values, tf.float16),
        "float32": tf.cast(values, tf.float32),
        "float64": tf.constant(values),
        "int32": tf.constant(np.arange(5, dtype=np.int32)),
        "int64": tf.constant(np.arange(5)),
        "scalar": tf.constant(2.5),
        "string": tf.constant(["no", "weights"]),
        # Large enough for the checksum of lanes.
        "wide": tf.constant(np.arange(2000, dtype=np.float32)),
    }
    sliced = [("sliced", "4 2 0,2:0,2"), ("sliced", "4 2 2,2:0,2")]
    tf.raw_ops.SaveV2(
        prefix=str(folder / "types"),
        tensor_names=[*tensors, *(name for name, _ in sliced)],
        shape_and_slices=[*("" for _ in tensors), *(part for _, part in sliced)],
        tensors=[*tensors.values(), tf.ones((2, 2)), tf.ones((2, 2))],
    )


def make_sentence_piece() -> None:
    """A model as English ALBERT's, with brackets of its maker and a map of characters, and its own ids of texts."""
    import random
    import unicodedata

    import sentencepiece

    folder = started("sentence_piece", None)
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 6))) for _ in range(300)]
    rules = folder / "rules.tsv"
    rules.write_text("201C\t22\n201D\t22\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(generator.choices(words, k=8)) for _ in range(800)]),
        model_prefix=str(folder / "30k-clean"),
        vocab_size=len(vocabulary()),
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        user_defined_symbols=["(", ")", '"'],
        normalization_rule_tsv=str(rules),
        minloglevel=2,
    )
    for needless in (rules, folder / "30k-clean.vocab"):
        needless.unlink()
    processor = sentencepiece.SentencePieceProcessor(str(folder / "30k-clean.model"))
    ends = {name: processor.piece_to_id(f"[{name}]") for name in ("CLS", "SEP")}
    texts = []
    for text in [*TEXTS, "ABC jade (gig)", "  (a)(b) ((c ", "``x'' \u201cabba\u201d", "jag caf\u00e9 JAG"]:
        # As Google's preprocess_text prepares it.
        prepared = " ".join(text.split()).replace("``", '"').replace("''", '"')
        letters = [letter for letter in unicodedata.normalize("NFKD", prepared) if not unicodedata.combining(letter)]
        ids = processor.encode("".join(letters).lower())
        texts.append({"text": text, "ids": [ends["CLS"], *ids, ends["SEP"]]})
    (folder / "texts.json").write_text(json.dumps(texts, ensure_ascii=False) + "\n", encoding="utf-8")


def make_texts() -> None:
    tokenizer = Tokenizer({token: index for index, token in enumerate(vocabulary())}, do_lower_case=True)
    texts = [{"text": text, "ids": [int(token) for token in tokenizer.encode(text)[0]]} for text in TEXTS]
    (HERE / "texts.json").write_text(json.dumps(texts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    chosen = sys.argv[1:] or [name.removeprefix("make_") for name in list(globals()) if name.startswith("make_")]
    for chosen_name in chosen:
        globals()[f"make_{chosen_name}"]()
