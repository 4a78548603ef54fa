"""Vespa's hugging-face-embedder: a graph, its tokenizer, and the component of services.xml."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

from hdexport.package.files import write_text, write_tokenizer
from hdexport.package.graph import GraphOptions, Outputs, write_graph
from hdexport.package.prompts import prompts_of_package
from hdexport.package.readers import run_onnx, tokenizer_file
from hdexport.package.target import Package, PackageTarget
from hdruntime.arrays import FloatArray

_COMPONENT = """<!-- In services.xml, inside <container>; the paths are relative to the application package. -->
<component id="$name" type="hugging-face-embedder">
    <transformer-model path="models/$name/model.onnx"/>
    <tokenizer-model path="models/$name/tokenizer.json"/>
    <max-tokens>$length</max-tokens>
    <!-- Every token has the pooled embedding. -->
    <pooling-strategy>cls</pooling-strategy>
    <normalize>false</normalize>{prepend}
</component>
"""
_PREPEND = """
    <prepend>
        <query>{query}</query>
        <document>{document}</document>
    </prepend>"""


def _write(package: Package) -> None:
    write_graph(package.bundle, package.directory / "model.onnx", package.graph)
    write_tokenizer(package)
    query, document = prompts_of_package(package)
    prepend = _PREPEND.format(query=escape(query), document=escape(document)) if query or document else ""
    write_text(package, "services.xml", _COMPONENT.replace("{prepend}", prepend.replace("$", "$$")))


def _run(package: Package, text: str) -> Mapping[str, FloatArray]:
    """The state of the first token; max-tokens is the tokenizer's truncation."""
    encoding = tokenizer_file(package.directory / "tokenizer.json").encode(text)
    return {"sentence_embedding": run_onnx(package.directory / "model.onnx", encoding)["last_hidden_state"][0, 0]}


TARGET = PackageTarget(
    name="vespa",
    system="Vespa",
    source="https://docs.vespa.ai/en/embedding.html",
    write=_write,
    run=_run,
    prompts=True,
    next_step="Copy FOLDER to models/ of the application package, and services.xml's component into yours.",
    graph=GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS, token_type_ids=True),
    takes=frozenset({"dtype", "name"}),
)
