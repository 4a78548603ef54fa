"""Fine-tune a classifier with transformers, build a bundle of it, and classify without PyTorch.

    python examples/classify.py MODEL OUTPUT

MODEL is a checkpoint of BERT's kind; twelve texts and ten steps are enough to show the way, not to train a model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import hdruntime
from hdexport.build import BuildOptions, build
from hdruntime.jobs import LocalPool, plan_job, run_job

TEXTS = {
    "billing": ["I was charged twice", "Please refund my invoice", "The card payment failed", "My receipt is wrong"],
    "bug": ["The app crashes at start", "An error appears on save", "The page is blank", "The button does nothing"],
    "praise": ["Great work, thank you", "I love the new design", "This is so fast now", "Best support ever"],
}
UNSEEN = ["Why is there a second charge on my card?", "It crashes when I save", "Thank you, lovely support"]


def fine_tune(model: Path, output: Path, *, steps: int = 10) -> None:
    """Train a head, and the encoder with it, on `TEXTS`; write a checkpoint."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    labels = list(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(labels), id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)}
    )
    batch = tokenizer([text for texts in TEXTS.values() for text in texts], padding=True, return_tensors="pt")
    target = torch.tensor([label for label, texts in enumerate(TEXTS.values()) for _ in texts])
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-4)
    classifier.train()
    for _ in range(steps):
        loss = classifier(**batch, labels=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    classifier.save_pretrained(output)
    tokenizer.save_pretrained(output)


def classify(bundle: Path, texts: Path, labels: Path) -> list[str]:
    """Classify the lines of a text file.

    Args:
        bundle: a bundle of the task text-classification.
        texts: one text per line.
        labels: JSON Lines to write, with the columns `id`, `label`, `score`, `scores`, `tokens` and `error`.
    """
    job = plan_job(hdruntime.open_bundle(bundle), [texts], labels)
    with hdruntime.load(bundle) as session:
        run_job(job, LocalPool(session, job.task, options=job.options))
    return [json.loads(line)["label"] for line in labels.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Fine-tune, build and classify."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path, help="a directory that does not exist yet")
    arguments = parser.parse_args()
    checkpoint, bundle = arguments.output / "checkpoint", arguments.output / "bundle"
    fine_tune(arguments.model, checkpoint)
    # `hdexport build CHECKPOINT --max-len 128 -o BUNDLE`; the task, text-classification, follows from the checkpoint.
    build(BuildOptions(model=checkpoint, output=bundle, max_len=128))
    texts = arguments.output / "texts.txt"
    texts.write_text("".join(text + "\n" for text in UNSEEN), encoding="utf-8")
    for text, label in zip(UNSEEN, classify(bundle, texts, arguments.output / "labels.jsonl"), strict=True):
        print(f"{label:8} {text}")


if __name__ == "__main__":
    main()
