#!/usr/bin/env bash
# Library: ray 2.60.0
# Guess: a column of vectors leaves Ray Data as a list of floats, as Arrow and vector databases have it, and is of one type
#   whether a function gave NumPy's vectors or lists.
# Happens: NumPy's vectors become a tensor type of Ray's own (`ArrowTensorTypeV2`), also in Parquet, where a program without
#   Ray sees the type below it. Lists of Python floats become lists of double. A fixed-size list of Arrow stays one, in a batch
#   of NumPy an array of objects.
# Minded: runtime/hdruntime/ray/mapper.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    ray==2.60.0 pandas==3.1.1 fsspec==2026.9.0 pyarrow==26.0.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1")
import numpy as np
import pyarrow as pa
import ray

READ = """
import json, sys, pyarrow.parquet as pq
print(json.dumps([str(pq.read_schema(file).field("v").type) for file in sys.argv[1:]]))
"""
vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
fixed = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 3)})
logging.disable()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
ray.data.DataContext.get_current().enable_progress_bars = False
print("ray", ray.__version__)
sets = {
    "NumPy": ray.data.range(2).map_batches(lambda batch: {"v": vectors[batch["id"]]}),
    "lists": ray.data.range(2).map_batches(lambda batch: {"v": vectors[batch["id"]].tolist()}),
    "Arrow": ray.data.from_arrow(fixed),
}
with tempfile.TemporaryDirectory() as folder:
    types, files = {}, []
    for name, rows in sets.items():
        types[name] = [str(kind) for kind in rows.schema().types]
        rows.write_parquet(f"{folder}/{name}")
        files.append(str(next(Path(folder, name).glob("*.parquet"))))
    said = subprocess.run([sys.executable, "-c", READ, *files], capture_output=True, check=True, text=True).stdout
batch = sets["Arrow"].take_batch(2)["v"]
ray.shutdown()
outside = dict(zip(sets, json.loads(said)))
for name, kinds in types.items():
    print(name, "|", *kinds, "| in Parquet, without Ray:", outside[name])
print("batch of Arrow's in NumPy:", batch.dtype, batch.shape)
assert "ArrowTensorTypeV2" in types["NumPy"][0] and "list<item: double>" in types["lists"][0]
assert "fixed_size_list<item: float>[3]" in types["Arrow"][0] and (batch.dtype, batch.shape) == (object, (2,))
PYTHON
