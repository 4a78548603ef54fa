"""Model types that no family has: why not, and the nearest supported type.

People try some of them; of the others, the library's classes say whether they are encoders of texts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

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

_LINEAR = "a BERT or RoBERTa with --attention favor:features=256, whose cost is linear, too"
_WINDOWS = "a BERT or RoBERTa with --attention window:256"
_HASHES = "a BERT or RoBERTa with --attention lsh:chunk=64,rounds=4, or a Reformer"
_ENCODERS = "an encoder: all-MiniLM-L6-v2, ModernBERT or XLM-RoBERTa, with --max-len for long texts"
_PLAIN = "BERT or XLM-RoBERTa, for the text alone"
_LONG_SEQUENCES = "the encoder of a LED, a LongT5 or a BigBird-Pegasus"


class Unsupported(NamedTuple):
    """A model type that cannot be built: why not, and the nearest type that is supported, as the ends of sentences."""

    reason: str
    nearest: str


_PAGES = "it reads where words stand on a page, as well as the text"
_IMAGES = "it reads images, as well as the text"
_TOWER = "it was trained to name images, in a few words"
_MISLAID = "it attends to earlier tokens only, whatever class transformers lists it in"
_UNTRIED = "no family has been written and tested for it"
_SEQUENCES = "its encoder is half of a model that generates text, and was trained for a decoder"

UNSUPPORTED = {
    "bart": Unsupported(_SEQUENCES, _LONG_SEQUENCES),
    "bros": Unsupported(_PAGES, _PLAIN),
    "canine": Unsupported("it reads characters, and shortens them between its layers", "XLM-RoBERTa"),
    "clip_text_model": Unsupported(_TOWER, _ENCODERS),
    "convbert": Unsupported("half of its heads are convolutions that each token computes", "ELECTRA"),
    "embedding_gemma2": Unsupported(
        "it reads images, sounds and videos as well",
        "its text model alone, embedding_gemma2_text: AutoModel.from_pretrained(MODEL).language_model.save_pretrained",
    ),
    "emu3": Unsupported(_MISLAID, _ENCODERS),
    "esmc": Unsupported(_UNTRIED, "ESM-2, for proteins as well"),
    "flaubert": Unsupported(_UNTRIED, "CamemBERT, for French as well"),
    "fnet": Unsupported("it mixes tokens by Fourier transforms, without a mask for padding", _LINEAR),
    "funnel": Unsupported("it pools tokens between its layers, by as many as the text has", _WINDOWS),
    "ibert": Unsupported("it computes in integers of its own", "a RoBERTa with --int8"),
    "layoutlm": Unsupported(_PAGES, _PLAIN),
    "layoutlmv2": Unsupported(_PAGES, _PLAIN),
    "layoutlmv3": Unsupported(_PAGES, _PLAIN),
    "lilt": Unsupported(_PAGES, _PLAIN),
    "llama4": Unsupported(_MISLAID, _ENCODERS),
    "lxmert": Unsupported(_IMAGES, _PLAIN),
    "m2m_100": Unsupported(_SEQUENCES, "XLM-RoBERTa"),
    "markuplm": Unsupported(_PAGES, _PLAIN),
    "mbart": Unsupported(_SEQUENCES, "XLM-RoBERTa"),
    "mistral4": Unsupported(_MISLAID, _ENCODERS),
    "mllama": Unsupported(_MISLAID, _ENCODERS),
    "mobilebert": Unsupported(_UNTRIED, "a small BERT, such as all-MiniLM-L6-v2"),
    "modernvbert": Unsupported(_IMAGES, "ModernBERT"),
    "molmo2_text": Unsupported(_MISLAID, _ENCODERS),
    "mra": Unsupported("its attention picks blocks by kernels of its own", _HASHES),
    "mvp": Unsupported(_SEQUENCES, _LONG_SEQUENCES),
    "new": Unsupported(
        "its code is not in transformers, which has the same model as a gte",
        "alibaba-nlp-community/gte-multilingual-base",
    ),
    "nystromformer": Unsupported(
        "its attention is by landmarks, the means of a number of segments that every length is cut into, padding "
        "included",
        _LINEAR,
    ),
    "openai_privacy_filter": Unsupported(
        "its feed-forward networks are 128 experts, of which each token chooses 4, and where two are nearly as good, "
        "rounding chooses",
        "a ModernBERT or an UltraBERT fine-tuned for token-classification",
    ),
    "pegasus": Unsupported(_SEQUENCES, _LONG_SEQUENCES),
    "pegasus_x": Unsupported(_SEQUENCES, _LONG_SEQUENCES),
    "perceiver": Unsupported("it reads bytes into a fixed number of states", "XLM-RoBERTa"),
    "roberta-prelayernorm": Unsupported(
        "its answers were seen to differ from transformers' in the fourth digit, as float32 and float64 do there",
        "RoBERTa",
    ),
    "roc_bert": Unsupported("it reads the shapes and sounds of characters, as well as the text", "BERT"),
    "splinter": Unsupported("its heads look for tokens that stand for questions", "BERT"),
    "squeezebert": Unsupported(_UNTRIED, "a small BERT, such as all-MiniLM-L6-v2"),
    "switch_transformers": Unsupported("its feed-forward networks are chosen token by token", "T5's encoder"),
    "t5gemma": Unsupported(_SEQUENCES, "the encoder of a T5"),
    "tapas": Unsupported("it reads rows and columns of tables, as well as the text", _PLAIN),
    "tipsv2_text_model": Unsupported(_TOWER, _ENCODERS),
    "ultravbert": Unsupported(_IMAGES, "UltraBERT"),
    "xlm": Unsupported(_UNTRIED, "XLM-RoBERTa"),
    "yoso": Unsupported("its attention is sampled by hashes in kernels of its own", _HASHES),
}
"""``model_type`` -> why not, and the nearest supported type."""


def unsupported(model_type: str) -> Unsupported | None:
    """Why a model type cannot be built; None of one that transformers does not know, or that nobody has judged."""
    if model_type in UNSUPPORTED:
        return UNSUPPORTED[model_type]
    doing = what_it_is(model_type)
    return None if doing is None else Unsupported(f"it is no encoder of texts: {doing}", _ENCODERS)


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


@functools.cache
def _model_types(auto_class: str) -> frozenset[str]:
    """Model types that an auto class loads; none where the installed library has no such class."""
    import transformers.models.auto.modeling_auto as auto

    return frozenset(getattr(auto, f"MODEL_FOR_{auto_class}_MAPPING_NAMES", ()))
