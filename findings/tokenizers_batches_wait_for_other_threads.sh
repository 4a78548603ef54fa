#!/usr/bin/env bash
# Library: tokenizers 0.23.3
# Guess: `encode_batch` of two words takes as long as two calls of `encode`, whatever other threads do with tokenizers of their
#   own, since the library releases Python's lock.
# Happens: `encode_batch` computes in threads that all tokenizers of a process share. While they encode a long batch of another
#   thread, it waits until that batch is almost done, for seconds. `encode` computes in the calling thread, and takes
#   microseconds meanwhile.
# Minded: runtime/hdruntime/text/tokenization.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import statistics
import threading
import time

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers


def tokenizer():
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


one, other = tokenizer(), tokenizer()
texts = ["aaaaaa " * 100_000] * 4
calls = {"encode_batch": lambda: other.encode_batch(["a", "a"]), "encode": lambda: [other.encode("a") for _ in range(2)]}
seconds = {}
for name, call in calls.items():
    call()
    thread = threading.Thread(target=one.encode_batch, args=(texts,))
    thread.start()
    time.sleep(0.2)
    times = []
    while thread.is_alive():
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    thread.join()
    seconds[name] = max(times) if name == "encode_batch" else statistics.median(times)
print("tokenizers", tokenizers.__version__, "seconds beside a long batch:", seconds)
assert seconds["encode_batch"] > 100 * seconds["encode"] and seconds["encode_batch"] > 0.1
PYTHON
