"""``config.json`` of a NEZHA, with the keys and defaults of transformers 4."""

# No postponed annotations in this module: `strict` checks values against them, and takes no strings.
from huggingface_hub.dataclasses import strict
from transformers import BertConfig


@strict
class NezhaConfig(BertConfig):
    """A NEZHA: BERT's sizes, and how far distances are told apart.

    Attributes:
        max_relative_position: the distance, in tokens, that all beyond it count as.
        max_position_embeddings: tokens that it was trained with; NEZHA has no table of positions.
    """

    model_type = "nezha"

    vocab_size: int = 21128
    max_relative_position: int = 64
    classifier_dropout: float | int | None = 0.1
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3

    def validate_architecture(self) -> None:
        """Refuse, by a ValueError, configurations of no NEZHA."""
        super().validate_architecture()
        if self.max_relative_position < 1:
            raise ValueError(f"max_relative_position is {self.max_relative_position}; it must be 1 or more")
        head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
        if rest or head_dim % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not make {self.num_attention_heads} heads of an even size: "
                "distances are sines and as many cosines"
            )
