"""Model types that people try and that no family has: why not, and what comes nearest."""

from __future__ import annotations

__all__ = ["UNSUPPORTED", "Unsupported"]

from dataclasses import dataclass

_LINEAR = "a BERT or RoBERTa with --attention favor:features=256, whose cost is linear, too"
_WINDOWS = "a BERT or RoBERTa with --attention window:256"
_HASHES = "a BERT or RoBERTa with --attention lsh:chunk=64,rounds=4, or a Reformer"
_ENCODERS = "an encoder: all-MiniLM-L6-v2, ModernBERT or XLM-RoBERTa, with --max-len for long texts"
_LONG_SEQUENCES = "the encoder of a LED, a LongT5 or a BigBird-Pegasus"
_RELATIVE = "an ELECTRA or RoBERTa for short texts; T5, MPNet or NEZHA for attention by distance"


@dataclass(frozen=True)
class Unsupported:
    """A model type that cannot be built.

    Attributes:
        reason: why not, as the end of a sentence.
        nearest: what can, as the end of a sentence.
    """

    reason: str
    nearest: str


_DECODER = "it attends to earlier tokens only, to generate text"
_SEQUENCES = "its encoder is half of a model that generates text, and was trained for a decoder"

UNSUPPORTED = {
    "bart": Unsupported(_SEQUENCES, _LONG_SEQUENCES),
    "canine": Unsupported("it reads characters, and shortens them between its layers", "XLM-RoBERTa"),
    "convbert": Unsupported("half of its heads are convolutions that each token computes", "ELECTRA"),
    "deberta": Unsupported("its attention is of content and distance in both directions", _RELATIVE),
    "deberta-v2": Unsupported("its attention is of content and distance in both directions", _RELATIVE),
    "fnet": Unsupported("it mixes tokens by Fourier transforms, without a mask for padding", _LINEAR),
    "funnel": Unsupported("it pools tokens between its layers, by as many as the text has", _WINDOWS),
    "gpt2": Unsupported(_DECODER, _ENCODERS),
    "llama": Unsupported(_DECODER, _ENCODERS),
    "m2m_100": Unsupported(_SEQUENCES, "XLM-RoBERTa"),
    "mbart": Unsupported(_SEQUENCES, "XLM-RoBERTa"),
    "mistral": Unsupported(_DECODER, _ENCODERS),
    "mra": Unsupported("its attention picks blocks by kernels of its own", _HASHES),
    "nystromformer": Unsupported(
        "its attention is by landmarks, the means of a number of segments that every length is cut into, padding "
        "included",
        _LINEAR,
    ),
    "pegasus": Unsupported(_SEQUENCES, _LONG_SEQUENCES),
    "pegasus_x": Unsupported(_SEQUENCES, _LONG_SEQUENCES),
    "perceiver": Unsupported("it reads bytes into a fixed number of states", "XLM-RoBERTa"),
    "switch_transformers": Unsupported("its feed-forward networks are chosen token by token", "T5's encoder"),
    "yoso": Unsupported("its attention is sampled by hashes in kernels of its own", _HASHES),
}
"""``model_type`` -> why not, and what comes nearest."""
