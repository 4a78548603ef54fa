"""The model families: one file or folder each, and the registry of them all."""

from __future__ import annotations

__all__ = ["SUPPORTED_MODEL_TYPES", "Family", "convertible_model_types", "family_of", "generic_family"]

import importlib

from hdexport.model.family import Family, ModelClasses

_MODULE_OF_MODEL_TYPE = {
    "albert": "albert",
    "bert": "bert",
    "distilbert": "bert",
    "electra": "bert",
    "ernie": "bert",
    "big_bird": "big_bird",
    "bigbird_pegasus": "bigbird_pegasus",
    "deberta": "deberta",
    "deberta-v2": "deberta",
    "esm": "esm",
    "eurobert": "eurobert",
    "embedding_gemma2_text": "gemma",
    "gemma3_text": "gemma",
    "gte": "gte",
    "jina_embeddings_v3": "gte",
    "led": "led",
    "longformer": "longformer",
    "longt5": "longt5",
    "luke": "luke",
    "modernbert": "modernbert",
    "modernbert-decoder": "modernbert_decoder",
    "mpnet": "mpnet",
    "neomme": "neomme",
    "nezha": "nezha.family",
    "nomic_bert": "nomic_bert",
    "performer": "performer.family",
    "qwen3": "qwen3",
    "reformer": "reformer",
    "megatron-bert": "rembert",
    "rembert": "rembert",
    "camembert": "roberta",
    "data2vec-text": "roberta",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "xlm-roberta-xl": "roberta",
    "roformer": "roformer",
    "mt5": "t5",
    "t5": "t5",
    "umt5": "t5",
    "transfo-xl": "transfo_xl.family",
    "ultrabert": "ultrabert",
    "xlnet": "xlnet",
    "xmod": "xmod",
}
"""``model_type`` of ``config.json`` -> module of this package whose `FAMILY` it belongs to. Modules are imported on
demand, as they need PyTorch."""

SUPPORTED_MODEL_TYPES = tuple(sorted(_MODULE_OF_MODEL_TYPE))


def family_of(model_type: str) -> Family:
    """The family of a model type, whose classes are registered with transformers; a generic family for other types."""
    module = _MODULE_OF_MODEL_TYPE.get(model_type)
    if module is None:
        return generic_family()
    family: Family = importlib.import_module(f"hdexport.families.{module}").FAMILY
    if family.classes is not None:
        family.classes.register()
    return family


def generic_family(classes: ModelClasses | None = None) -> Family:
    """The family of models whose code is traced without changes.

    Args:
        classes: the classes of a checkpoint's code; None for transformers' classes.
    """
    # It needs PyTorch, as families do.
    from hdexport.families.any import route

    return route.generic_family(classes)


def convertible_model_types() -> list[str]:
    """The model types whose attention ``--attention`` can replace."""
    return [name for name in SUPPORTED_MODEL_TYPES if family_of(name).conversion_unsupported_reason is None]
