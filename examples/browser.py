"""Make a page that embeds a text of 3000 tokens in the browser, and compares the embedding with the bundle's.

    python examples/browser.py BUNDLE FOLDER
    npm install --prefix FOLDER @huggingface/transformers
    python -m http.server --directory FOLDER

BUNDLE gives embeddings: `hdexport build --max-len 4096 -o BUNDLE` makes one of the sample model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

import hdruntime
from hdexport.package.write import PackageOptions, package_bundle

PAGE = Path(__file__).with_suffix(".html")


def make_page(bundle: Path, folder: Path, *, tokens: int) -> None:
    """Write the page, the bundle's files for Transformers.js, and a text with its embedding.

    Args:
        bundle: a bundle that gives embeddings.
        folder: where to; made when missing.
        tokens: of the text, special tokens included.
    """
    model = package_bundle(
        hdruntime.open_bundle(bundle), PackageOptions(target="transformers.js", output=folder / "model", force=True)
    ).path
    text = text_of(model / "tokenizer.json", tokens)
    with hdruntime.load(bundle, "onnxruntime") as session:
        (embedding,) = session.embed([text])
    (folder / "expected.json").write_text(json.dumps({"text": text, "embedding": embedding.tolist()}))
    shutil.copyfile(PAGE, folder / "index.html")


def text_of(tokenizer: Path, tokens: int) -> str:
    """The beginning of Python's help about its debugger, of so many tokens."""
    text = " ".join(word for word in topics["debugger"].split() if word.strip("*="))
    encoding = Tokenizer.from_file(str(tokenizer)).encode(text)
    special = sum(encoding.special_tokens_mask)
    places = encoding.offsets[encoding.special_tokens_mask.index(0) :]
    return text[: places[tokens - special - 1][1]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", type=Path, help="directory that `hdexport build` made")
    parser.add_argument("folder", type=Path, help="directory of the page")
    parser.add_argument("--tokens", type=int, default=3000, help="tokens of the text (default: 3000)")
    options = parser.parse_args()
    make_page(options.bundle, options.folder, tokens=options.tokens)
    print(f"npm install --prefix {options.folder} @huggingface/transformers")
    print(f"python -m http.server --directory {options.folder}")


if __name__ == "__main__":
    main()
