"""Writes docs/clients.md: runs the clients of tests/clients against servers: python docs/generate_clients.py

`make clients` makes their environments.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "clients.md"

_HEAD = """\
# Clients

Written by `python docs/generate_clients.py`, which runs the programs of `tests/clients`; change these instead.

Keep the client that your program has, and give it the address of `hdexport serve`:

```python
import cohere

client = cohere.ClientV2("any key", base_url="http://127.0.0.1:8000")
found = client.embed(model="any", texts=["The first text."], input_type="search_document", embedding_types=["float"])
```

| client | address |
|---|---|
{addresses}
LangChain's `HuggingFaceEndpointEmbeddings` takes no address (langchain-huggingface 1.2.3 refuses a URL as `model`): use
`OpenAIEmbeddings`.

## What each received

The numbers that each client returned on {date}, beside those of a session of the same bundle: the sample model for 4096
tokens with prompts (three texts of up to 562 tokens, and 200 short ones), a reranker and a classifier with random
weights, float32 on a CPU. `int8`, `uint8`, `binary` and `ubinary` are compared with sentence-transformers'
`quantize_embeddings`, value for value, and so are token ids and texts. Of floats the table has the first one, and the
largest error of all.

| client | call | received | bundle | largest error |
|---|---|---|---|---|
"""

_TAIL = """
The default suite sends what these clients send and compares the exact bodies; `make test-all` runs the clients.
"""

_ADDRESSES = {
    "`cohere`, LangChain's and LlamaIndex's classes of Cohere": "`base_url`: `http://HOST:8000`",
    "Haystack's components of Cohere": "`api_base_url`: `http://HOST:8000`",
    "Haystack's components of vLLM": (
        "`api_base_url`: `http://HOST:8000/v1`; `raise_on_failure=True`: without it, documents of a refused request "
        "come back without embeddings"
    ),
    "`openai`, LangChain's `OpenAIEmbeddings` with `check_embedding_ctx_length=False`": (
        "`base_url`: `http://HOST:8000/v1`"
    ),
    "`huggingface_hub.InferenceClient`, `tei-client`, `pytei-client`": "`http://HOST:8000`",
    "LlamaIndex's `TextEmbeddingsInference` and `TextEmbeddingInference`": "`base_url`: `http://HOST:8000`",
    "`voyageai`": "`base_url`: `http://HOST:8000/v1`; LlamaIndex's `VoyageEmbedding` takes no address: "
    "[give it this client](serve_api.md#chunks-of-documents)",
    "`perplexityai`": "`base_url`: `http://HOST:8000`",
    "`infinity_client`": "`base_url`: `http://HOST:8000/v1`",
    "LiteLLM, embeddings": (
        "`api_base`: `http://HOST:8000/v1`; of `cohere/` the route, `http://HOST:8000/v2/embed`; of `huggingface/` "
        "`http://HOST:8000`, with `input_type='feature-extraction'`: without it, it asks huggingface.co about the model"
        "; `dimensions` needs `hosted_vllm/`, or a model's name with `text-embedding-3`"
    ),
    "LiteLLM, rerank": (
        "`api_base`: `http://HOST:8000`; `infinity/` needs `return_documents=False`, since infinity's documents are "
        "texts and those of the others objects"
    ),
    "Open WebUI": "external reranker: `http://HOST:8000/v1/rerank`; embedding engine OpenAI: `http://HOST:8000/v1`",
}


def page(folder: Path) -> str:
    """The page; `folder` is for bundles."""
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model
    from support.real_clients import PROGRAMS, make_reranker, served
    from support.tiny_bundle import make_bundle

    build(BuildOptions(model=default_model()[0], output=folder / "sample", max_len=4096, verify=None))
    (folder / "reranker").mkdir()
    make_reranker(folder / "reranker")
    classifier = make_bundle(folder / "classifier", task="text-classification")
    lines = []
    with served(folder / "sample", folder / "reranker" / "bundle", classifier, folder) as servers:
        for name in PROGRAMS:
            for row in servers.received(name):
                error = "equal" if row.is_exact and not row.error else f"{row.error:.0e}"
                found = f"{_shown(row.first)} | {_shown(row.own)} | {error}"
                lines.append(f"| {row.client.replace(', ', ' on ', 1)} | {row.call} | {found} |\n")
    addresses = "".join(f"| {client} | {address} |\n" for client, address in _ADDRESSES.items())
    date = datetime.datetime.now(datetime.UTC).date()
    return _HEAD.format(date=date, addresses=addresses) + "".join(lines) + _TAIL


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"{' '.join(value.split()[:3])}..."
    return str(value) if isinstance(value, int) else f"{value:.8f}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(page(Path(made)), encoding="utf-8")
