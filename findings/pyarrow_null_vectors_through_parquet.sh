#!/usr/bin/env bash
# Library: pyarrow 22.0.0, 25.0.1, 26.0.1
# Guess: a column of lists of a fixed size, one of them null, goes through a Parquet file as every other column does.
# Happens: 22 does not write it, nor the column that a cast to lists makes of it, as the cast leaves entries in the null list
#   ("Lists with non-zero length null components are not supported"). 25 writes the file and cannot read it back ("Expected all
#   lists to be of size=2"), and takes the cast column. 26 does all of it.
# Minded: runtime/hdruntime/jobs/arrow_columns.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cd "$folder"
for version in 22.0.0 25.0.1 26.0.1; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "pyarrow==$version"
    "$folder/venv/bin/python" - <<'PYTHON'
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [[1.0, 2.0], None, [3.0, 4.0]]


def outcome(column):
    step = "write"
    try:
        pq.write_table(pa.table({"vector": column}), "rows.parquet")
        step = "read"
        # Without threads: where they read, processes were seen to abort at their end, now and then, whatever the column.
        rows = pq.read_table("rows.parquet", use_threads=False)["vector"].to_pylist()
    except pa.ArrowException as error:
        print(" ", step, type(error).__name__, error)
        return step
    assert rows == ROWS
    return "right"


fixed = pa.array(ROWS, pa.list_(pa.float32(), 2))
found = outcome(fixed), outcome(fixed.cast(pa.list_(pa.float32())))
print("pyarrow", pa.__version__, "fixed, cast:", *found)
assert found == {"22": ("write", "write"), "25": ("read", "right"), "26": ("right", "right")}[pa.__version__[:2]]
PYTHON
done
