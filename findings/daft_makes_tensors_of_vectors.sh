#!/usr/bin/env bash
# Library: daft 0.7.26
# Guess: NumPy vectors of one length become a column of lists of that length, as Arrow's and vector databases' tools have it.
# Happens: they become Tensor[Float32], without a length, whose Arrow column is an extension type of Daft's own, and so is that
#   of its type `embedding`. A column that came from Arrow as a list of fixed size stays one; a cast to
#   `DataType.fixed_size_list` makes one of the others.
# Minded: examples/daft_embeddings.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check daft==0.7.26 numpy==2.4.6 pyarrow==25.0.1
"$folder/venv/bin/python" - <<'PYTHON'
import os
import sys

import daft
import numpy as np
import pyarrow as pa
from daft import DataType, col

vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
made = daft.from_pydict({"v": list(vectors)})
frames = {
    "NumPy": made,
    "embedding": made.select(col("v").cast(DataType.embedding(DataType.float32(), 3))),
    "cast": made.select(col("v").cast(DataType.fixed_size_list(DataType.float32(), 3))),
    "Arrow": daft.from_arrow(pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 3)})),
}
found = {name: (str(frame.schema()["v"].dtype), frame.to_arrow().schema.field("v").type) for name, frame in frames.items()}
print("daft", daft.__version__)
for name, (own, arrow) in found.items():
    print(name, "|", own, "|", arrow)
fixed = pa.list_(pa.float32(), 3)
assert found["NumPy"][0] == "Tensor[Float32]" and found["cast"][1] == found["Arrow"][1] == fixed
assert all(isinstance(found[name][1], pa.BaseExtensionType) for name in ("NumPy", "embedding"))
# Without the end of Python, in which Daft has crashed on a busy machine.
sys.stdout.flush()
os._exit(0)
PYTHON
