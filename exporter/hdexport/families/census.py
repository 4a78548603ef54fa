"""Which model types of transformers are encoders of texts, by the classes that the library has for them."""

from __future__ import annotations

__all__ = ["is_text_encoder", "what_it_is"]

import functools

_OF_TEXT = ("MASKED_LM", "TEXT_ENCODING")
"""Auto classes that encoders of texts are in, and others by mistake only."""

_HEADS_ON_TEXT = ("TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING")
"""Auto classes that decoders are in, too."""

_GENERATES = {
    "SEQ_TO_SEQ_CAUSAL_LM": "it generates text from text",
    "SPEECH_SEQ_2_SEQ": "it generates text from speech",
    "IMAGE_TEXT_TO_TEXT": "it generates text from images and text",
    "CAUSAL_LM": "it attends to earlier tokens only, to generate text",
    "MULTIMODAL_LM": "it generates text from text and more",
}
"""Auto class -> the task of its models."""


@functools.cache
def _model_types(auto_class: str) -> frozenset[str]:
    """Model types that an auto class loads; none where the installed library has no such class."""
    import transformers.models.auto.modeling_auto as auto

    return frozenset(getattr(auto, f"MODEL_FOR_{auto_class}_MAPPING_NAMES", ()))


def is_text_encoder(model_type: str) -> bool:
    """Whether a model type of transformers encodes texts.

    A type does if there is a class that predicts masked tokens, or one for encoding text, or if it has a head on tokens
    or texts and generates nothing.
    """
    if any(model_type in _model_types(name) for name in _OF_TEXT):
        return True
    has_head = any(model_type in _model_types(name) for name in _HEADS_ON_TEXT)
    return has_head and not any(model_type in _model_types(name) for name in _GENERATES)


def what_it_is(model_type: str) -> str | None:
    """The work of a model type that is no encoder of texts, as a clause; None for an encoder, or an unknown type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES or is_text_encoder(model_type):
        return None
    for name, doing in _GENERATES.items():
        if model_type in _model_types(name):
            return doing
    return "transformers has no head for texts on it"
