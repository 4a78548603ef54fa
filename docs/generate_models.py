"""Writes docs/models.md from the registry of families and a record of measurements: python docs/generate_models.py

The records are what `python -m benchmarks.cpu.families --output benchmarks/results/families.jsonl` appends to, of which
a family's last row of each kind counts, and `python -m benchmarks.cpu.any_types --output
benchmarks/results/any_types.jsonl`, of which a type's last row counts.
"""

from __future__ import annotations

__all__ = ["RECORD", "TYPES", "page", "tried_types"]

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.family import UnsupportedReason

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
RECORD, TYPES = _RESULTS / "families.jsonl", _RESULTS / "any_types.jsonl"

_LENGTHS = (512, 4096)
_OWN_WINDOWS = ("window", "local_global")
"""Attention types that are windows already."""

_HEAD = """\
# Model families

Look up whether hdexport supports a model type, what it can change (positions, attention, tuning), and how fast the
bundle is beside PyTorch.

```sh
hdexport families    # the types with a family
```

* verified: `hdexport verify` in float32 passes for a random model of base shape, compared with transformers (no
  published weights).
* fp16: likewise in float16, by cosine.
* windows: *yes*, `--attention` can replace the attention (these are called BERT-like models); *its own*, the model
  has windows.
* engine: a TensorRT-RTX engine builds.
* N tokens: latency of one text, the bundle in ONNX Runtime divided by the model of transformers in PyTorch
  (scaled_dot_product_attention if available), float32, CPU. Below 1 the bundle is faster. A dash: not measured.

Tests repeat the float32 and float16 comparisons on tiny models at all lengths around the family's boundaries, with
every kind of padding. This page is written by `python docs/generate_models.py` from
`benchmarks/results/families.jsonl`, which `python -m benchmarks.cpu.families --output
benchmarks/results/families.jsonl` fills; change these instead.
"""

_ANY = """\
## Any other type

hdexport builds any other model type of transformers from its own code: encoders, decoders (with causal attention, or
bidirectional if `is_causal` is false), the encoder of encoder-decoder models, and with `--trust-remote-code` a class
in the checkpoint. A family adds what hdexport can *change*: positions, attention, tuning.

* **Attention** that is provably dense or causal becomes hdexport's operator, with memory linear in tokens. Provably:
  the mask depends only on padding and token order, and the module computes what the operator computes on random
  inputs. Windows, soft caps, sinks and biases are exported as standard operators, and `hdexport inspect` says that
  their memory grows with the square of the tokens.
* **Properties** are inferred from the model: tasks, rows of a position table, token types, the padding row. Before
  tracing, the model's code is run: a model whose output depends on padding, on the batch or on the call is rejected,
  and so is a model that needs more inputs than ids and a mask.
* **Verification**: every build compares all cases of `hdexport verify` (every length, batches of 1 and 3, padding on
  both sides) and texts. If the code compares the number of tokens with something (`if tokens % 16:`), PyTorch's trace
  reports it, and the lengths around that boundary are compared too. `--verify none` needs `--unverified`, which the
  manifest records.
* **Supported as for a family**: every task whose head transformers has, every backend; `--fp16`, `--bf16` and
  `--int8`; jobs, the server, `verify`, `rebuild`, `bench` and `package`. [Numbers](numbers.md#any-model-type) of
  published layouts beside sentence-transformers.
* **Not supported**: `--attention`, `--attention-scale`, positions beyond a table's rows, `extend` and `tune`. They
  need a family (`CONTRIBUTING.md`).
"""


_TRIED = """\
### Types that were tried

Each text model type of transformers {version} without a family: a tiny model with random weights was built and
verified for up to 200 tokens, from ids (`python -m benchmarks.cpu.any_types`). A nightly test builds the encoders.
Encoders are the types in `MODEL_FOR_MASKED_LM_MAPPING` and `MODEL_FOR_TEXT_ENCODING_MAPPING`; decoders are those with
a head for sequences, which embedders and rerankers are made of; generators are the library's other decoders; others
have heads for texts alone. A reason that begins with an error name is an error of transformers for such a small
configuration.
"""

_KINDS = {"encoder": "encoders", "decoder": "decoders", "generator": "generators", "other": "others"}

_PREAMBLES = re.compile(
    r"^(The answers of this \S+ by its own code depend on more than the text: |The code of (a|this) \S+ "
    r"|PyTorch could not export the model: |no tiny model: |/model/)"
)
"""Begins of refusals that say nothing of one type."""

_END = re.compile(r"( FAILED:| Failure message:).*", re.DOTALL)
"""The part of a refusal that is for its reporter."""

_LONGEST_REASON = 180


def page(record: Path = RECORD, types: Path = TYPES) -> str:
    """The page, Markdown.

    Args:
        record: JSON lines; families that are not in it have dashes.
        types: JSON lines of types without a family; none are listed where there is no such file.
    """
    rows = _last_rows(record)
    columns = [f"{tokens} tokens" for tokens in _LENGTHS]
    lines = ["| model type | verified | fp16 | windows | engine | " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * (5 + len(_LENGTHS)))
    lines += [_line(name, rows.get(name, {})) for name in SUPPORTED_MODEL_TYPES]
    return "\n".join([_HEAD, *lines, "", *_remarks(rows), _ANY, *tried_types(types)])


def tried_types(record: Path) -> list[str]:
    """The types without a family, of which the built ones are listed, and the others have a line each."""
    if not record.exists():
        return []
    rows = {row["model_type"]: row for row in map(json.loads, record.read_text(encoding="utf-8").splitlines())}
    lines = [_TRIED.format(version=max(row["transformers"] for row in rows.values()))]
    refused = {}
    for kind, words in _KINDS.items():
        of_kind = {name: row for name, row in sorted(rows.items()) if row["kind"] == kind}
        built = {name: row for name, row in of_kind.items() if row["outcome"] == "built"}
        families = sum(row["outcome"] == "has a family" for row in of_kind.values())
        refused |= {name: row for name, row in of_kind.items() if row["outcome"] not in ("built", "has a family")}
        known = (
            f", {families} have a family and {len(built)} more are built" if families else f", {len(built)} are built"
        )
        share = (families + len(built)) / max(1, len(of_kind))
        own = [name for name, row in built.items() if set(row["attention"]) == {"dense"}]
        lines += [f"Of {len(of_kind)} {words}{known}: {share:.0%}.", ""]
        lines += [f"* With hdexport's dense attention: {', '.join(own) or 'none'}."]
        lines += [
            f"* With attention from their code: {', '.join(name for name in built if name not in own) or 'none'}.",
            "",
        ]
    lines += ["| rejected | reason |", "|---|---|"]
    return [*lines, *(f"| {name} | {_reason(row['outcome'])} |" for name, row in sorted(refused.items())), ""]


def _reason(outcome: str) -> str:
    said = " ".join(_END.sub("", _PREAMBLES.sub("", outcome)).split()).rstrip(".:").replace("|", "/")
    if len(said) > _LONGEST_REASON:
        said = said[:_LONGEST_REASON].rpartition(" ")[0] + " ..."
    return said


def _last_rows(record: Path) -> dict[str, Mapping[str, Any]]:
    if not record.exists():
        return {}
    rows: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
        of_family = rows.setdefault(row["model_type"], {})
        if "ratios" in row:
            of_family.pop("failed", None)
        of_family.update(row)
    return rows


def _line(model_type: str, row: Mapping[str, Any]) -> str:
    checks = row.get("checks", {})
    verified, fp16, engine = (_verdict(checks.get(name)) for name in ("verified", "fp16", "engine"))
    ratios = {ratio["case"].rpartition(" ")[2]: ratio["median"] for ratio in row.get("ratios", [])}
    figures = [f"{ratios[str(tokens)]:.2f}" if str(tokens) in ratios else "-" for tokens in _LENGTHS]
    return f"| {model_type} | {verified} | {fp16} | {_windows(model_type)} | {engine} | {' | '.join(figures)} |"


def _verdict(outcome: str | None) -> str:
    return "-" if outcome is None else "yes" if outcome == "yes" else "no"


def _windows(model_type: str) -> str:
    family = family_of(model_type)
    if family.conversion_unsupported_reason is None:
        return "yes"
    native = family.native_attention
    has_windows = family.conversion_unsupported_reason is UnsupportedReason.NATIVE_WINDOWS
    return "its own" if has_windows or (native is not None and native.attention_type in _OWN_WINDOWS) else "no"


def _remarks(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why a family has no yes, and what was measured where."""
    lines = []
    for model_type in SUPPORTED_MODEL_TYPES:
        row = rows.get(model_type, {})
        reasons = {name: said for name, said in row.get("checks", {}).items() if said != "yes"}
        if "failed" in row:
            reasons["measured"] = row["failed"]
        lines += [f"* {model_type}, {name}: {said.removeprefix('no: ')}" for name, said in reasons.items()]
    measured = [row for row in rows.values() if "cpu" in row]
    machines = sorted({f"{row['cpu']}, {row['date'][:10]}, layers: {row['layers']}" for row in measured})
    if machines:
        lines += ["", f"Measured on: {'; '.join(machines)}."]
    return [*lines, ""] if lines else []


def _write() -> None:
    Path(__file__).with_name("models.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    _write()
