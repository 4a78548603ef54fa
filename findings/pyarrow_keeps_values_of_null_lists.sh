#!/usr/bin/env bash
# Library: pyarrow 26.0.1
# Guess: a null row of a list column has no values: `values` of the column has the values of the other rows, however the
#   column was made.
# Happens: a cast from lists of a fixed size to lists, float to double or not, leaves the null's two values in place: `values`
#   has 6 of 3 rows. The same column read from Parquet has 4, and so has `flatten()` of both. `values.to_numpy().reshape(-1, 2)`
#   is another matrix before and after a file.
# Minded: runtime/hdruntime/jobs/writers.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io

import pyarrow as pa
import pyarrow.parquet as pq

fixed = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
kinds = {"list": pa.list_(pa.float32()), "large list": pa.large_list(pa.float32()), "double": pa.list_(pa.float64())}
found = {}
for name, kind in kinds.items():
    cast, file = fixed.cast(kind), io.BytesIO()
    pq.write_table(pa.table({"vector": cast}), file)
    read = pq.read_table(file, use_threads=False)["vector"].chunk(0)
    assert read.to_pylist() == cast.to_pylist()
    found[name] = [len(cast.values), len(cast.flatten()), len(read.values), len(read.flatten())]
print("pyarrow", pa.__version__, "values and flatten of the cast, and of the file:", found)
assert all(lengths == [6, 4, 4, 4] for lengths in found.values())
PYTHON
