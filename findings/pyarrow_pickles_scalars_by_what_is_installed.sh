#!/usr/bin/env bash
# Library: pyarrow 26.0.1, pandas 3.1.1
# Guess: a pickled scalar is the scalar: `pickle.loads(pickle.dumps(scalar))` is equal to it, whatever else is installed.
# Happens: it is Python's value of it. Without pandas a scalar of nanoseconds raises a ValueError. With pandas timestamps are
#   equal, and times of a day lose their nanoseconds, without a message: 00:00:00.123456789 becomes 00:00:00.123456. An array of
#   one value is always equal.
# Minded: runtime/hdruntime/jobs/input_files.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/check.py" <<'PYTHON'
import pickle
from importlib.util import find_spec

import pyarrow as pa


def outcome(number, kind):
    value, array = pa.scalar(number, kind), pa.array([number], kind)
    assert pickle.loads(pickle.dumps(array)) == array
    try:
        return "equal" if pickle.loads(pickle.dumps(value)) == value else "another"
    except ValueError as error:
        return type(error).__name__


kinds = {"timestamp": (1_700_000_000_123_456_789, pa.timestamp("ns")), "time": (123_456_789, pa.time64("ns"))}
found = {name: outcome(*kind) for name, kind in kinds.items()}
has_pandas = find_spec("pandas") is not None
print("pyarrow", pa.__version__, "with pandas:", has_pandas, found)
assert found == ({"timestamp": "equal", "time": "another"} if has_pandas else dict.fromkeys(kinds, "ValueError"))
PYTHON
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1
"$folder/venv/bin/python" "$folder/check.py"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pandas==3.1.1
"$folder/venv/bin/python" "$folder/check.py"
