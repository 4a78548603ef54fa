"""Google's names of a model's variables, their shapes by its configuration, and Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Axis = str | int
"""A key of ``config.json``, or a number that all models have."""

MODEL_TYPES = ("albert", "bert", "electra", "nezha", "roformer")
"""The ``model_type`` of families whose checkpoints TensorFlow and bert4keras write."""

_CLASSES_LIKE_BERT = {"bert": "Bert", "nezha": "Nezha", "roformer": "RoFormer"}
"""Families whose variables have BERT's names -> begin of their classes' names in transformers."""


class Variable(NamedTuple):
    """A variable.

    Attributes:
        google: its name in a checkpoint of TensorFlow.
        hugging_face: the weight's name in transformers.
        axes: the axes of the variable in the checkpoint.
        transposed: whether the weight has these exchanged, as kernels do.
        identity: whether the variable may be missing: then it is ones on the diagonal, or a bias of zeros.
    """

    google: str
    hugging_face: str
    axes: tuple[Axis, ...]
    transposed: bool = False
    identity: bool = False


@dataclass(frozen=True, kw_only=True)
class Variables:
    """The variables of a model.

    Attributes:
        encoder: variables that every checkpoint has.
        heads: suffix of a class in transformers -> variables of its head, of which a checkpoint has all or none. The
            first head that is there says what the model was made for; "" says nothing.
        layer_scope: the part before the number in the names of layers' variables.
        class_prefix: prefix of the names of transformers' classes.
        computed: weights in transformers that follow from the configuration, and that no checkpoint of TensorFlow has.
    """

    encoder: tuple[Variable, ...]
    heads: tuple[tuple[str, tuple[Variable, ...]], ...] = field(default=())
    layer_scope: str
    class_prefix: str
    computed: dict[str, np.ndarray] = field(default_factory=dict)


def variables_of(model_type: str, config: dict[str, Any], *, generator: bool = False) -> Variables:
    """The variables that a checkpoint of TensorFlow can have, for a model type of `MODEL_TYPES`; `generator` is the
    smaller of the two models in a checkpoint of ELECTRA."""
    if model_type == "electra":
        return _electra(config, generator=generator)
    return _albert(config) if model_type == "albert" else _bert_like(model_type, config)


def _dense(
    google: str, hugging_face: str, inputs: Axis, outputs: Axis, *, identity: bool = False
) -> Iterator[Variable]:
    yield Variable(f"{google}/kernel", f"{hugging_face}.weight", (inputs, outputs), transposed=True, identity=identity)
    yield Variable(f"{google}/bias", f"{hugging_face}.bias", (outputs,), identity=identity)


def _norm(google: str, hugging_face: str, width: Axis) -> Iterator[Variable]:
    yield Variable(f"{google}/gamma", f"{hugging_face}.weight", (width,))
    yield Variable(f"{google}/beta", f"{hugging_face}.bias", (width,))


def _embeddings(google: str, hugging_face: str, width: Axis, *, positions: bool) -> Iterator[Variable]:
    rows: dict[str, Axis] = {"word": "vocab_size", "token_type": "type_vocab_size"}
    if positions:
        rows["position"] = "max_position_embeddings"
    for name, count in rows.items():
        yield Variable(f"{google}/{name}_embeddings", f"{hugging_face}.{name}_embeddings.weight", (count, width))
    yield from _norm(f"{google}/LayerNorm", f"{hugging_face}.LayerNorm", width)


def _layers(google: str, hugging_face: str, config: dict[str, Any]) -> Iterator[Variable]:
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"{google}/layer_{layer}", f"{hugging_face}.layer.{layer}"
        for part in ("query", "key", "value"):
            name = f"attention/self/{part}"
            yield from _dense(f"{ours}/{name}", f"{theirs}.attention.self.{part}", "hidden_size", "hidden_size")
        yield from _dense(
            f"{ours}/attention/output/dense", f"{theirs}.attention.output.dense", "hidden_size", "hidden_size"
        )
        yield from _norm(f"{ours}/attention/output/LayerNorm", f"{theirs}.attention.output.LayerNorm", "hidden_size")
        yield from _dense(
            f"{ours}/intermediate/dense", f"{theirs}.intermediate.dense", "hidden_size", "intermediate_size"
        )
        yield from _dense(f"{ours}/output/dense", f"{theirs}.output.dense", "intermediate_size", "hidden_size")
        yield from _norm(f"{ours}/output/LayerNorm", f"{theirs}.output.LayerNorm", "hidden_size")


def _linear(google: str, hugging_face: str, outputs: Axis) -> Iterator[Variable]:
    """A layer on top, whose weight Google stores as PyTorch does."""
    yield Variable(f"{google}/output_weights", f"{hugging_face}.weight", (outputs, "hidden_size"))
    yield Variable(f"{google}/output_bias", f"{hugging_face}.bias", (outputs,))


def _classifier() -> tuple[Variable, ...]:
    """Variables of Google's ``run_classifier.py``, which names them without a scope."""
    weight = Variable("output_weights", "classifier.weight", ("num_labels", "hidden_size"))
    return weight, Variable("output_bias", "classifier.bias", ("num_labels",))


def _bert_like(name: str, config: dict[str, Any]) -> Variables:
    """BERT's names in TensorFlow, and in transformers BERT's under another name."""
    projects = name == "roformer" and config["embedding_size"] != config["hidden_size"]
    width = "embedding_size" if projects else "hidden_size"
    encoder = [
        *_embeddings("bert/embeddings", f"{name}.embeddings", width, positions=name == "bert"),
        *(
            _dense("bert/encoder/embedding_hidden_mapping_in", f"{name}.embeddings_project", width, "hidden_size")
            if projects
            else ()
        ),
        *_layers("bert/encoder", f"{name}.encoder", config),
    ]
    masked = (
        *_dense("cls/predictions/transform/dense", "cls.predictions.transform.dense", "hidden_size", width),
        *_norm("cls/predictions/transform/LayerNorm", "cls.predictions.transform.LayerNorm", width),
        Variable("cls/predictions/output_bias", "cls.predictions.bias", ("vocab_size",)),
    )
    pooler = tuple(_dense("bert/pooler/dense", f"{name}.pooler.dense", "hidden_size", "hidden_size"))
    others: tuple[tuple[str, tuple[Variable, ...]], ...] = (
        (
            ("ForSequenceClassification", _classifier()),
            ("ForQuestionAnswering", tuple(_linear("cls/squad", "qa_outputs", 2))),
            ("", pooler),
            ("", tuple(_linear("cls/seq_relationship", "cls.seq_relationship", 2))),
        )
        if name in ("bert", "nezha")
        else ()
    )
    return Variables(
        encoder=tuple(encoder),
        heads=(("ForMaskedLM", masked), *others),
        layer_scope="bert/encoder/layer_",
        class_prefix=_CLASSES_LIKE_BERT[name],
        computed=_rotary_table(config) if name == "roformer" else {},
    )


def _rotary_table(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """RoFormer's sines and cosines: [positions, head_dim], float32."""
    width = config["hidden_size"] // config["num_attention_heads"]
    angles = np.outer(np.arange(config["max_position_embeddings"]), 10000.0 ** (-np.arange(0, width, 2) / width))
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    return {"roformer.encoder.embed_positions.weight": table}


def _albert(config: dict[str, Any]) -> Variables:
    encoder = [
        *_embeddings("bert/embeddings", "albert.embeddings", "embedding_size", positions=True),
        # Google does not project embeddings that are as wide as the layers; Hugging Face always does.
        *_dense(
            "bert/encoder/embedding_hidden_mapping_in",
            "albert.encoder.embedding_hidden_mapping_in",
            "embedding_size",
            "hidden_size",
            identity=config["embedding_size"] == config["hidden_size"],
        ),
    ]
    for group in range(config["num_hidden_groups"]):
        for member in range(config["inner_group_num"]):
            ours = f"bert/encoder/transformer/group_{group}/inner_group_{member}"
            theirs = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{member}"
            names = {f"attention_1/self/{part}": f"attention.{part}" for part in ("query", "key", "value")}
            for google, hugging_face in {**names, "attention_1/output/dense": "attention.dense"}.items():
                encoder += _dense(f"{ours}/{google}", f"{theirs}.{hugging_face}", "hidden_size", "hidden_size")
            encoder += _norm(f"{ours}/LayerNorm", f"{theirs}.attention.LayerNorm", "hidden_size")
            encoder += _dense(f"{ours}/ffn_1/intermediate/dense", f"{theirs}.ffn", "hidden_size", "intermediate_size")
            encoder += _dense(
                f"{ours}/ffn_1/intermediate/output/dense", f"{theirs}.ffn_output", "intermediate_size", "hidden_size"
            )
            encoder += _norm(f"{ours}/LayerNorm_1", f"{theirs}.full_layer_layer_norm", "hidden_size")
    masked = (
        *_dense("cls/predictions/transform/dense", "predictions.dense", "hidden_size", "embedding_size"),
        *_norm("cls/predictions/transform/LayerNorm", "predictions.LayerNorm", "embedding_size"),
        Variable("cls/predictions/output_bias", "predictions.bias", ("vocab_size",)),
    )
    pooler = tuple(_dense("bert/pooler/dense", "albert.pooler", "hidden_size", "hidden_size"))
    return Variables(
        encoder=tuple(encoder),
        heads=(
            ("ForMaskedLM", masked),
            ("ForSequenceClassification", _classifier()),
            ("", pooler),
            ("", tuple(_linear("cls/seq_relationship", "sop_classifier.classifier", 2))),
        ),
        layer_scope="bert/encoder/transformer/group_",
        class_prefix="Albert",
    )


def _electra(config: dict[str, Any], *, generator: bool) -> Variables:
    scope = "generator" if generator else "electra"
    encoder = [
        # A generator shares the discriminator's embeddings.
        *_embeddings("electra/embeddings", "electra.embeddings", "embedding_size", positions=True),
        *(
            _dense(f"{scope}/embeddings_project", "electra.embeddings_project", "embedding_size", "hidden_size")
            if config["embedding_size"] != config["hidden_size"]
            else ()
        ),
        *_layers(f"{scope}/encoder", "electra.encoder", config),
    ]
    of_generator = (
        *_dense("generator_predictions/dense", "generator_predictions.dense", "hidden_size", "embedding_size"),
        *_norm("generator_predictions/LayerNorm", "generator_predictions.LayerNorm", "embedding_size"),
        Variable("generator_predictions/output_bias", "generator_lm_head.bias", ("vocab_size",)),
    )
    head = "discriminator_predictions"
    of_discriminator = (
        *_dense(f"{head}/dense", f"{head}.dense", "hidden_size", "hidden_size"),
        *_dense(f"{head}/dense_1", f"{head}.dense_prediction", "hidden_size", 1),
    )
    return Variables(
        encoder=tuple(encoder),
        heads=(("ForMaskedLM", of_generator) if generator else ("ForPreTraining", of_discriminator),),
        layer_scope=f"{scope}/encoder/layer_",
        class_prefix="Electra",
    )
