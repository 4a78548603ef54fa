"""BentoML: a service that runs the bundle in hdexport's runtime."""

from __future__ import annotations

from hdexport.package.files import with_bundle
from hdexport.package.target import PackageTarget

_SCRIPT = '''"""$name in BentoML: `bentoml serve service:Embedder`, then POST /embed with {"texts": [...]}."""

from __future__ import annotations

from pathlib import Path

import bentoml
import numpy as np

import hdruntime


@bentoml.service(traffic={"timeout": 300})
class Embedder:
    def __init__(self) -> None:
        self.session = hdruntime.load(Path(__file__).parent / "bundle", max_seq_length=$length)

    @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=60000)
    def embed(self, texts: list[str]) -> np.ndarray:
        return self.session.embed(texts)
'''


TARGET = PackageTarget(
    name="bentoml",
    system="BentoML",
    source="https://docs.bentoml.com/en/latest/build-with-bentoml/services.html",
    write=with_bundle({"service.py": _SCRIPT}),
    next_step="cd FOLDER && bentoml serve service:Embedder",
)
