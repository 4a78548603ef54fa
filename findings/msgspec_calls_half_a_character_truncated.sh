#!/usr/bin/env bash
# Library: msgspec 0.22.0
# Guess: "Input data was truncated" says that the end of the JSON is missing, as of a body that was cut in transit.
# Happens: so does a whole body whose text ends with half of a surrogate pair, as Python's `json.dumps` writes a text that was cut
#   in UTF-16 or decoded with `surrogateescape`. In the middle of the text the error names the surrogate pair, and raw bytes
#   that are no UTF-8 are a UnicodeDecodeError, whose position counts from the start of the text, not of the body.
# Minded: runtime/hdruntime/serve/request_body.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check msgspec==0.22.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

import msgspec

bodies = {
    "cut in transit": b'{"input": "a',
    "half at the end": json.dumps({"input": "a\ud83d"}).encode(),
    "half in the middle": json.dumps({"input": "\ud83da text"}).encode(),
    "no UTF-8": b'{"input": "\xff"}',
}
found = {}
for name, body in bodies.items():
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found[name] = str(error)
    print(f"{name} | {body!r} | {found[name]}")
assert found["cut in transit"] == found["half at the end"] == "Input data was truncated"
assert "surrogate pair" in found["half in the middle"]
assert "position 0" in found["no UTF-8"]
PYTHON
