"""The classes of a bundle's classifier: their names, and how their scores come from logits."""

from __future__ import annotations

from collections.abc import Sequence

from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle, read_config
from hdruntime.errors import InputError
from hdruntime.text.logits import Activation


def labels_of(manifest: Manifest) -> Sequence[str]:
    """Names of the classes in the order of the logits; unnamed ones get transformers' defaults."""
    size = next(spec.shape[-1] for spec in manifest.outputs if spec.name == "logits")
    # A dynamic axis is a name.
    return manifest.labels or [f"LABEL_{index}" for index in range(size if isinstance(size, int) else 0)]


def activation_of(bundle: Bundle) -> Activation:
    """The cross-encoder's, or Hugging Face's pipeline's choice by the checkpoint's configuration."""
    settings = bundle.manifest.sentence
    if settings is not None and settings.activation is not None:
        return Activation(settings.activation)
    config = read_config(bundle)
    if config.get("problem_type") == "regression":
        return Activation.IDENTITY
    if config.get("problem_type") == "multi_label_classification" or len(labels_of(bundle.manifest)) == 1:
        return Activation.SIGMOID
    return Activation.SOFTMAX


def check_classifier(manifest: Manifest) -> None:
    """Refuse bundles that do not score texts.

    Raises:
        InputError: the task is another than text-classification.
    """
    if manifest.task != "text-classification":
        raise InputError(
            f"This bundle's task is {manifest.task}, which gives no scores of pairs.\n"
            "Build a checkpoint with a head for them: --task text-classification"
        )


def check_reranker(manifest: Manifest) -> None:
    """Refuse bundles that do not give one score per pair of texts.

    Raises:
        InputError: the task is another than text-classification, or there are several classes.
    """
    check_classifier(manifest)
    labels = labels_of(manifest)
    if len(labels) != 1:
        raise InputError(
            f"Ranking needs one score per pair, and this bundle has {len(labels)} classes: {', '.join(labels)}.\n"
            "Use CrossEncoder.predict, and rank by the class that you want."
        )
