#!/usr/bin/env bash
# Library: onnxruntime 1.31.1
# Guess: PyPI's package for Linux, a library, writes nothing but what a program asks for; older ones wrote nothing.
# Happens: importing it makes ~/.cache/Microsoft/DeveloperTools/.onnxruntime with an identity of the machine and a database of
#   events to send: the system, the CPU's model, the texts of errors with names of files. 1.28.0 writes nothing, and neither
#   does a process that has ORT_DISABLE_TELEMETRY=1 before the import.
# Minded: runtime/hdruntime/__init__.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cd "$folder"
cat > run.py <<'PYTHON'
import onnx
import onnxruntime

model = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 18]>
    relu (float[n] x) => (float[n] y) { y = Relu(x) }""")
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
try:
    onnxruntime.InferenceSession("file_of_mine.onnx", providers=["CPUExecutionProvider"])
except Exception as error:
    print(type(error).__name__)
PYTHON
cat > look.py <<'PYTHON'
import pathlib
import sqlite3
import sys

version, expected = sys.argv[1:]
files = sorted(path for path in pathlib.Path("home").rglob("*") if path.is_file())
print("onnxruntime", version, [str(path) for path in files])
assert bool(files) == (expected == "events")
if files:
    (database,) = [path for path in files if path.name == "onnxruntime.db"]
    events = b"".join(row[0] for row in sqlite3.connect(database).execute("select payload from events"))
    kept = [word for word in ("cpuModel", "osDescription", "file_of_mine.onnx") if word.encode() in events]
    print("events have", kept)
    assert len(kept) == 3
PYTHON
for version in 1.28.0 1.31.1; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==$version onnx==1.23.2 numpy==2.4.6
    for switched_off in "" 1; do
        rm -rf home && mkdir home
        expected=nothing
        if [ "$version$switched_off" = 1.31.1 ]; then expected=events; fi
        env HOME="$folder/home" XDG_CACHE_HOME= ORT_DISABLE_TELEMETRY="$switched_off" venv/bin/python run.py
        venv/bin/python look.py "$version" "$expected"
    done
done
