"""Every model type of the installed transformers is supported, refused with a reason, or no encoder of texts."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.families.unsupported import UNSUPPORTED, is_text_encoder, what_it_is
from hdruntime.errors import ModelError

OTHERWISE_FOUND = {
    # Encoders of models that generate text.
    *("bigbird_pegasus", "led", "longt5"),
    # Their classes generate text; what is built attends to all tokens, or to those before.
    *("embedding_gemma2_text", "gemma3_text", "modernbert-decoder", "qwen3", "xlnet"),
    # transformers has no classes for them, or no longer.
    *("nezha", "performer", "transfo-xl"),
}
"""Supported model types that the library's classes do not show to be encoders of texts."""


def test_every_encoder_of_the_library_is_supported_or_refused_with_a_reason() -> None:
    """A new version of transformers fails here: support its new encoders, or say in unsupported.py why not."""
    judged = set(SUPPORTED_MODEL_TYPES) | set(UNSUPPORTED)
    missing = sorted(name for name in CONFIG_MAPPING_NAMES if is_text_encoder(name) and name not in judged)
    assert not missing
    assert not set(SUPPORTED_MODEL_TYPES) & set(UNSUPPORTED)


def test_the_census_knows_encoders() -> None:
    """Were its rule empty, or true of all, the test above would say nothing."""
    found = {name for name in CONFIG_MAPPING_NAMES if is_text_encoder(name)}
    assert set(SUPPORTED_MODEL_TYPES) - found <= OTHERWISE_FOUND
    assert 60 < len(found) < 120
    assert len(CONFIG_MAPPING_NAMES) > 5 * len(found)


@pytest.mark.parametrize(
    ("model_type", "doing"),
    [("llama", "it attends to earlier tokens only, to generate text"), ("whisper", "it generates text from speech")],
)
def test_what_is_no_encoder_is_refused_as_that(model_type: str, doing: str) -> None:
    assert what_it_is(model_type) == doing
    with pytest.raises(ModelError, match=rf"'{model_type}' is not supported: it is no encoder of texts: {doing}.\n"):
        family_of(model_type)


def test_encoders_and_names_that_nobody_knows_are_not_judged_so() -> None:
    assert what_it_is("bert") is None
    assert what_it_is("clap2") is None
