"""Writes docs/targets.md from the targets of `hdexport package`: python docs/generate_targets.py"""

from __future__ import annotations

__all__ = ["page"]

from pathlib import Path

from hdexport.package.check import COSINE, LENGTHS
from hdexport.package.target import PackageTarget, targets

_HEAD = """\
# Other systems

Written by `python docs/generate_targets.py` from `exporter/hdexport/package/targets/`; change these instead.

`hdexport package` writes a bundle as the files that another system loads:

```sh
hdexport package bundle --for spring-ai -o encoder
```

```
    1 words: sentence_embedding has the cosine 1.0000000 with the bundle's
   20 words: sentence_embedding has the cosine 1.0000000 with the bundle's
  600 words: sentence_embedding has the cosine 1.0000000 with the bundle's
 3000 words: sentence_embedding has the cosine 1.0000000 with the bundle's
encoder: for Spring AI
Next: Put the folder on the classpath, and application.properties' lines into yours.
```

Before anything is published, the command runs the package by the system's own rules (how it tokenizes, truncates, pools
and normalizes) on texts of {lengths} words, and compares the outputs with the bundle's in hdexport's
runtime. A cosine below {cosine} ends the command, and nothing is written.

| `--for` | system | truncates at | run with | rules read in |
|---|---|---|---|---|
"""

_TAIL = """
*Run with* names the releases in which a package of the sample model was loaded on Linux with a text of 3 002 tokens
(2026-11-29); a dash means that the rules were read and are followed in code, and that the system itself was not run.

* **The graph** has ONNX's standard operators only, without functions and custom domains: opset 18 by default (`--opset`
  17 to 20), IR version 8 (`--ir-version` 8 to 10), weights inside the file up to 2 GB (`--no-single-file` puts them
  beside it). It computes in float32, also where the weights are float16.
* **Pooling.** Systems that pool by themselves (Spring AI, DJL, OpenSearch, LangChain4j, Vespa, fastembed, OpenVINO) get
  the pooled embedding as the state of every token, so that the result is right for models with any pooling. `--pooled`
  does so for `--for onnx`.
* **Length.** `tokenizer.json`, `tokenizer_config.json` and the sentence-transformers settings of a package, and of a
  bundle, have one limit: [the length of texts](sentence_transformers.md#the-length-of-texts). A system with a limit of
  its own needs `--max-seq-length`.
* **Prompts** such as `query: ` are not added by these systems, but for Vespa, whose component has them.
* **Inputs.** Bundles with inputs that only hdexport's runtime feeds (Longformer's global attention mask, the memory of
  recurrent models) are refused; serve them with [`hdexport serve`](serve.md).
"""


def page() -> str:
    """The page."""
    rows = "".join(_row(target) for target in targets().values())
    *most, last = map(str, LENGTHS)
    head = _HEAD.replace("{lengths}", f"{', '.join(most)} and {last}").replace("{cosine}", str(COSINE))
    return head + rows + _TAIL


def _row(target: PackageTarget) -> str:
    longest = "the bundle's length" if target.longest is None else f"{target.longest} tokens"
    tried = ", ".join(target.tried) or "-"
    source = f"[its documentation]({target.source})" if target.source.startswith("https") else target.source
    return f"| {target.name} | {target.system} | {longest} | {tried} | {source} |\n"


if __name__ == "__main__":
    (Path(__file__).parent / "targets.md").write_text(page(), encoding="utf-8")
