"""Extend an embedding model to longer texts and train its new positions, then build a bundle of it.

    python examples/fine_tune.py MODEL OUTPUT --texts FILE.txt --steps 2000

Contrastive training with PyTorch alone: two halves of a long text belong together, halves of different texts do not.
FILE has one long text per line; without it, the topics of Python's own help show the way.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics

from hdexport.build import BuildOptions, build
from hdexport.extend import ExtendOptions, extend

TEMPERATURE = 0.05


def train(checkpoint: Path, texts: list[str], *, max_len: int, steps: int, batch: int = 4) -> list[float]:
    """Train a checkpoint in place.

    Args:
        checkpoint: a directory that `extend` wrote.
        texts: long ones, each worth two inputs of `max_len` tokens.
        max_len: tokens of an input.
        steps: batches.
        batch: texts of a batch; each is compared with the halves of all others.

    Returns:
        the loss of every step.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModel.from_pretrained(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model.train()

    def embedded(inputs: list[str]) -> torch.Tensor:
        tokens = tokenizer(inputs, padding=True, truncation=True, max_length=max_len, return_tensors="pt")
        mask = tokens["attention_mask"].unsqueeze(-1)  # [batch, tokens, 1]
        hidden = model(**tokens).last_hidden_state  # [batch, tokens, dimensions]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    losses = []
    stream = cycle(texts)
    for _ in range(steps):
        chosen = list(islice(stream, batch))
        first = embedded([text[: len(text) // 2] for text in chosen])
        second = embedded([text[len(text) // 2 :] for text in chosen])
        cosines = first @ second.T  # [batch, batch]
        loss = torch.nn.functional.cross_entropy(cosines / TEMPERATURE, torch.arange(len(chosen)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(checkpoint)
    return losses


def main() -> None:
    """Extend, train and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint's directory, or organisation/name on the Hugging Face Hub")
    parser.add_argument("output", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    texts = arguments.texts.read_text(encoding="utf-8").splitlines() if arguments.texts else list(topics.values())
    checkpoint = arguments.output / "checkpoint"
    extend(ExtendOptions(model=arguments.model, output=checkpoint, max_len=arguments.max_len))
    longest = sorted(texts, key=len)[-len(texts) // 4 :]
    losses = train(checkpoint, longest, max_len=arguments.max_len, steps=arguments.steps)
    print("loss: " + " ".join(f"{loss:.3f}" for loss in losses))
    build(BuildOptions(model=checkpoint, output=arguments.output / "bundle", max_len=arguments.max_len))


if __name__ == "__main__":
    main()
