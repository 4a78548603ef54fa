"""A picture of the kernels' rates beside those of peers, a panel for windows and one for dense attention.

Usage: python -m benchmarks.gpu.picture benchmarks/results/gpu_h100.jsonl docs/gpu-kernels.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from hdexport.bench.page.charts import LIGHT_COLOURS

_PANELS = {
    "256 tokens on each side": {
        "window": "hdexport",
        "cuDNN window": "cuDNN",
        "FlashAttention 4 window": "FlashAttention 4",
        "FlexAttention window": "FlexAttention",
    },
    "the whole text": {
        "open window": "hdexport",
        "torch SDPA dense, cuDNN": "cuDNN",
        "FlashAttention 4 dense": "FlashAttention 4",
        "torch SDPA dense, flash": "PyTorch's flash",
    },
}
"""Panel -> case of a row -> the name of its line."""

_STEP = "kernels-d64"
_SCALE = 1.5


def picture(rows: Sequence[dict[str, Any]]) -> alt.HConcatChart:
    """Rates of the step that times windows at head_dim 64, of the required work alone."""
    names = list(dict.fromkeys(name for lines in _PANELS.values() for name in lines.values()))
    colour = alt.Color(
        "who:N", sort=names, title=None, scale=alt.Scale(domain=names, range=LIGHT_COLOURS[: len(names)])
    )
    panels = []
    for title, lines in _PANELS.items():
        points = [
            {"tokens": row["tokens"], "rate": row["tflops"], "who": lines[row["case"]]}
            for row in rows
            if row.get("step") == _STEP and row["case"] in lines
        ]
        chart = alt.Chart(alt.InlineData(values=points), title=title, width=330, height=250)
        panels.append(
            chart.mark_line(point=True).encode(
                x=alt.X("tokens:Q", scale=alt.Scale(type="log", base=2), title="tokens of a text"),
                y=alt.Y("rate:Q", title="TFLOP/s of the required work", scale=alt.Scale(domainMin=0)),
                color=colour,
            )
        )
    (gpu,) = {row["gpu"] for row in rows if row["case"] == "machine"}
    title = alt.TitleParams(f"Attention kernels, float16, head_dim 64, 65536 tokens in all, {gpu}", anchor="start")
    return alt.hconcat(*panels, title=title).configure(background="white", font="'DejaVu Sans', sans-serif")


def main(arguments: Sequence[str]) -> int:
    """Draw the file of rows into the file of the picture."""
    source, target = map(Path, arguments)
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    target.write_bytes(vl_convert.vegalite_to_png(picture(rows).to_json(), scale=_SCALE))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
