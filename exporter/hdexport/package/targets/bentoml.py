"""BentoML: a service that runs the bundle in hdexport's runtime."""

from __future__ import annotations

from hdexport.package.files import write_bundle, write_text
from hdexport.package.target import Package, PackageTarget

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


def _write(package: Package) -> None:
    write_bundle(package, package.directory / "bundle")
    write_text(package, "service.py", _SCRIPT)


TARGET = PackageTarget(
    name="bentoml",
    system="BentoML",
    source="https://docs.bentoml.com/en/latest/build-with-bentoml/services.html",
    write=_write,
    next_step="cd FOLDER && bentoml serve service:Embedder",
)
