"""The model families: one file or folder each, and the registry of them all."""

from __future__ import annotations

__all__ = ["SUPPORTED_MODEL_TYPES", "Family", "convertible_model_types", "family_of", "generator_model_types"]

import importlib

from hdexport.families.unsupported import unsupported
from hdexport.model.family import Family
from hdruntime.errors import ModelError

_MODULE_OF_MODEL_TYPE = {
    "albert": "albert",
    "bert": "bert",
    "big_bird": "big_bird",
    "bigbird_pegasus": "bigbird_pegasus",
    "camembert": "roberta",
    "data2vec-text": "roberta",
    "deberta": "deberta",
    "deberta-v2": "deberta",
    "distilbert": "bert",
    "electra": "bert",
    "embedding_gemma2_text": "gemma",
    "ernie": "bert",
    "esm": "esm",
    "eurobert": "eurobert",
    "gemma3_text": "gemma",
    "gte": "gte",
    "jina_embeddings_v3": "jina_embeddings_v3",
    "led": "led",
    "longformer": "longformer",
    "longt5": "longt5",
    "luke": "luke",
    "megatron-bert": "rembert",
    "modernbert": "modernbert",
    "mpnet": "mpnet",
    "mt5": "t5",
    "neomme": "neomme",
    "nezha": "nezha.family",
    "nomic_bert": "nomic_bert",
    "performer": "performer.family",
    "qwen3": "qwen3",
    "reformer": "reformer",
    "rembert": "rembert",
    "roberta": "roberta",
    "t5": "t5",
    "ultrabert": "ultrabert",
    "umt5": "t5",
    "xlm-roberta": "roberta",
    "xlm-roberta-xl": "roberta",
    "roformer": "roformer",
    "transfo-xl": "transfo_xl.family",
    "xlnet": "xlnet",
    "xmod": "xmod",
}
"""``model_type`` of ``config.json`` -> module of this package. The modules need torch, so they load on demand."""

SUPPORTED_MODEL_TYPES = tuple(sorted(_MODULE_OF_MODEL_TYPE))


def family_of(model_type: str) -> Family:
    """The family that a ``model_type`` belongs to; transformers knows its classes from then on.

    Raises:
        ModelError: no family has that type; the message lists all types, and names the nearest of some.
    """
    try:
        module = _MODULE_OF_MODEL_TYPE[model_type]
    except KeyError:
        known = unsupported(model_type)
        raise ModelError(
            f"The model type {model_type!r} is not supported"
            + (f": {known.reason}.\nThe nearest that works: {known.nearest}" if known else ".")
            + f"\nSupported: {', '.join(SUPPORTED_MODEL_TYPES)}."
        ) from None
    family: Family = importlib.import_module(f"hdexport.families.{module}").FAMILY
    if family.classes is not None:
        family.classes.register()
    return family


def convertible_model_types() -> list[str]:
    """The model types whose attention can be exchanged for one of another kind."""
    return [name for name in SUPPORTED_MODEL_TYPES if family_of(name).why_not_converted is None]


def generator_model_types() -> list[str]:
    """The model types whose classifiers can be made of generators."""
    return [name for name in SUPPORTED_MODEL_TYPES if family_of(name).of_generator is not None]
