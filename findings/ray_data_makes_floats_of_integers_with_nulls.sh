#!/usr/bin/env bash
# Library: ray 2.60.0
# Guess: a batch of `map_batches`, whose format is NumPy by default, has the column's integers; where some are null, an array
#   of objects with None, as a column of strings has it.
# Happens: a column of integers with one null is float64, and null is NaN. Numbers from 2**53 on, such as hashes as ids, become
#   others, without a message: 9007199254740993 is 9007199254740992. With `batch_format="pyarrow"` the column stays as it is.
# Minded: runtime/hdruntime/ray/mapper.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    ray==2.60.0 pandas==3.1.1 fsspec==2026.9.0 pyarrow==26.0.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import logging
import os

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1")
import pyarrow as pa
import ray

number = 2**53 + 1
logging.disable()
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
ray.data.DataContext.get_current().enable_progress_bars = False
rows = ray.data.from_arrow(pa.table({"id": pa.array([number, None]), "text": pa.array(["a", None])}))
batch, arrow = rows.take_batch(2), rows.take_batch(2, batch_format="pyarrow")
ray.shutdown()
print("ray", ray.__version__, {name: (str(array.dtype), array.tolist()) for name, array in batch.items()})
assert batch["id"].dtype == float and int(batch["id"][0]) == number - 1 and batch["text"].tolist() == ["a", None]
assert arrow["id"].to_pylist() == [number, None]
PYTHON
