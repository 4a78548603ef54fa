"""What `make demo` shows after the build: long documents embedded by the bundle, and a question answered.

Usage: python docs/demo.py DIRECTORY    (it holds the bundle that `hdexport build --max-len 4096 --fp16` wrote)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

import hdruntime

QUESTION = "How do I make sure that a file is closed even if an error happens?"
NEAREST = 5


def main(directory: Path) -> None:
    """Embed the topics of Python's own help with `hdexport run` and rank them against the question."""
    (bundle,) = (path.parent for path in directory.glob("*/manifest.json"))
    documents, embeddings = directory / "topics.jsonl", directory / "embeddings.jsonl"
    with documents.open("w", encoding="utf-8") as file:
        for name, text in topics.items():
            file.write(json.dumps({"id": name, "text": text}) + "\n")
    longest = max(len(text) for text in topics.values())
    print(f"\n{len(topics)} topics of Python's help, the longest of {longest} characters:")
    hdexport = Path(sys.executable).with_name("hdexport")
    subprocess.run(
        [hdexport, "run", bundle, documents, "-o", embeddings, "--id-column", "id", "--overflow", "truncate"],
        check=True,
    )
    rows = [json.loads(line) for line in embeddings.read_text(encoding="utf-8").splitlines()]
    matrix = np.array([row["embedding"] for row in rows], np.float32)  # [topics, dimensions], rows of length 1
    with hdruntime.load(bundle) as session:
        (question,) = session.embed([QUESTION])
    scores = matrix @ question
    print(f"\n{QUESTION}\nNearest topics:")
    for index in np.argsort(-scores)[:NEAREST]:
        print(f"  {scores[index]:.3f}  {rows[index]['id']:<24} {rows[index]['tokens']:>5} tokens")
    print(f"\nThe bundle is {bundle}:")
    sys.stdout.flush()
    subprocess.run([hdexport, "inspect", bundle], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
