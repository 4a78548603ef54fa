#!/usr/bin/env bash
# Library: transformers 5.23.0 beside 4.57.6
# Guess: `AutoTokenizer` gives a pair its token types, as it did in transformers 4, where the file's post-processor has them.
# Happens: only for classes of models such as BERT's own. A checkpoint whose `tokenizer_config.json` names
#   `PreTrainedTokenizerFast` becomes a `TokenizersBackend`, whose `model_input_names` has no `token_type_ids`: BERT then runs
#   both texts of a pair as the first one, without a warning. `openvino_tokenizers` reads the same attribute.
# Minded: exporter/hdexport/graph/passes/fold_default_inputs.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/show.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

folder = Path(sys.argv[1])
words = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"))}
tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
tokenizer.normalizer = normalizers.BertNormalizer()
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
tokenizer.save(str(folder / "tokenizer.json"))
found = {}
for name in ("PreTrainedTokenizerFast", "BertTokenizerFast"):
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **special}))
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    found[name] = loaded("a", "b").get("token_type_ids")
    print(transformers.__version__, name, "loaded as", type(loaded).__name__, found[name])
types = [0, 0, 0, 1, 1]
is_new = int(transformers.__version__.split(".")[0]) >= 5
assert found == {"PreTrainedTokenizerFast": None if is_new else types, "BertTokenizerFast": types}
PYTHON
for version in 4.57.6 5.23.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
    "$folder/$version/bin/python" "$folder/show.py" "$folder"
done
