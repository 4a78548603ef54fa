"""Writes docs/targets.md from the targets of `hdexport package`: python docs/generate_targets.py"""

from __future__ import annotations

__all__ = ["page"]

from pathlib import Path

from hdexport.package.check import COSINES, LENGTHS
from hdexport.package.target import PackageTarget, targets

_HEAD = """\
# Other systems

Written by `python docs/generate_targets.py` from `exporter/hdexport/package/targets/`; change these instead.

`hdexport package` writes a bundle as the files that another system loads:

```sh
hdexport package bundle --for spring-ai -o encoder
```

```
    1 words, float32: sentence_embedding has the cosine 1.0000000 with the bundle's
   20 words, float32: sentence_embedding has the cosine 1.0000000 with the bundle's
  600 words, float32: sentence_embedding has the cosine 1.0000000 with the bundle's
 3000 words, float32: sentence_embedding has the cosine 1.0000000 with the bundle's
encoder: for Spring AI
Next: Put the folder on the classpath, and application.properties' lines into yours.
```

Before anything is published, the command runs the package by the system's own rules (how it tokenizes, truncates, pools
and normalizes) on texts of {lengths} words, and compares the outputs with the bundle's in hdexport's
runtime. A cosine below {cosine}, or {int8} with 8-bit weights, ends the command, and nothing is written.

| `--for` | system | truncates at | run with | rules read in |
|---|---|---|---|---|
"""

_TAIL = """
*Run with* names the releases in which a package of the sample model was loaded on Linux with a text of 3 002 tokens
(2026-11-29); a dash means that the rules were read and are followed in code, and that the system itself was not run.

* **The graph** has ONNX's standard operators only, without functions and custom domains: opset 18 by default (`--opset`
  17 to 20), IR version 8 (`--ir-version` 8 to 10), weights inside the file up to 2 GB (`--no-single-file` puts them
  beside it). It computes in float32, also where the weights are float16.
* **8-bit weights**: [`--dtype int8`](#8-bit-weights).
* **Texts.** `text-in` writes a graph with the tokenizer inside, for [databases](databases.md): opset 17, and operators
  of onnxruntime-extensions.
* **Pooling.** Systems that pool by themselves (Spring AI, DJL, OpenSearch, LangChain4j, Vespa, fastembed, OpenVINO) get
  the pooled embedding as the state of every token, so that the result is right for models with any pooling. `--pooled`
  does so for `--for onnx`.
* **Length.** `tokenizer.json`, `tokenizer_config.json` and the sentence-transformers settings of a package, and of a
  bundle, have one limit: [the length of texts](sentence_transformers.md#the-length-of-texts). A system with a limit of
  its own needs `--max-seq-length`. DJL truncates to 512 tokens unless it is told otherwise: `serving.properties` tells
  DJL, and `application.properties` Spring AI. OpenSearch and LangChain4j do not tell it. LangChain4j also averages
  parts of 510 tokens, which a text of 512 with its two special tokens never has.
* **Prompts.** Vespa's component and OpenSearch's registration get the model's prompts for queries and documents; the
  graph of `text-in` puts one before every text, the default or that of `--prompt-name`. The
  other systems with a graph add none: the command prints them, and you write them before your texts. A model with a
  default prompt, which the bundle writes before every text, is rejected there, unless `--no-prompts` says that your
  texts have it; so are models whose prompts are not pooled, and models of a chat template. Systems that run the bundle
  itself (mlflow, lancedb, triton and others) write prompts and templates as it does.
* **Inputs.** A graph computes itself what only hdexport's runtime feeds: Longformer's global attention (the first token
  of a text to classify), and the state of a recurrent model before its first token, so that every text is read whole.
  Question answering with global questions is rejected: a graph cannot reject a question that is too long.

## 8-bit weights

`--dtype int8` makes the file of the graph smaller by two thirds, and the model faster
([sizes and times](browser.md#onnx-runtime)):

```sh
hdexport package bundle --for onnx --dtype int8 -o encoder
```

Weights of linear layers and of embedding tables are 8-bit integers, and activations are rounded while the model runs
(onnxruntime's dynamic quantization, in standard operators). ONNX Runtime 1.16.3 and 1.31.1, its
[WebAssembly and Node packages](browser.md#onnx-runtime), Transformers.js, fastembed 0.9.1, light-embed 1.0.9 and tract
0.23.9 run it; every system here that runs ONNX Runtime takes it.

Embeddings change: {int8} is the least cosine that the command accepts, and an error lists the cosines. The sample model
has 0.988, 0.994, 0.995 and 0.993 for texts of 1, 20, 600 and 3000 words. Of 270 texts of up to 59 words the worst has
0.972 (one word), the worst of 8 tokens or more 0.976, and the median is 0.993; 92 % of the texts keep their nearest
neighbour among the others. Embed documents and queries with the same file.
[`hdexport build --int8`](precision.md#int8-on-cpus) calibrates on texts and is more precise (0.999), for hdexport's
runtime.
"""


def page() -> str:
    """The page."""
    rows = "".join(_row(target) for target in targets().values())
    *most, last = map(str, LENGTHS)
    head = _HEAD.replace("{lengths}", f"{', '.join(most)} and {last}")
    text = head + rows + _TAIL
    return text.replace("{cosine}", str(COSINES["float32"])).replace("{int8}", str(COSINES["int8"]))


def _row(target: PackageTarget) -> str:
    longest = "the bundle's length" if target.longest is None else f"{target.longest} tokens"
    tried = ", ".join(target.tried) or "-"
    source = f"[its documentation]({target.source})" if target.source.startswith("https") else target.source
    return f"| {target.name} | {target.system} | {longest} | {tried} | {source} |\n"


if __name__ == "__main__":
    (Path(__file__).parent / "targets.md").write_text(page(), encoding="utf-8")
