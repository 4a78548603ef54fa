"""LanceDB's registry of embedding functions: a class that runs the bundle in hdexport's runtime."""

from __future__ import annotations

from hdexport.package.files import with_bundle
from hdexport.package.target import PackageTarget

_SCRIPT = '''"""$name in LanceDB: `from embed import function`, then `function.VectorField()`."""

from functools import cached_property
from pathlib import Path

import hdruntime
from lancedb.embeddings import TextEmbeddingFunction, get_registry, register


@register("hdexport")
class HdexportEmbeddings(TextEmbeddingFunction):
    """A bundle of hdexport, by its folder."""

    name: str = str(Path(__file__).parent / "bundle")
    max_seq_length: int = $length

    model_config = {"ignored_types": (cached_property,)}

    @cached_property
    def _session(self):
        return hdruntime.load(self.name, max_seq_length=self.max_seq_length)

    def ndims(self):
        return $size

    def generate_embeddings(self, texts):
        return list(self._session.embed(list(texts)))


function = get_registry().get("hdexport").create()
'''


TARGET = PackageTarget(
    name="lancedb",
    system="LanceDB",
    source="python/lancedb/embeddings/base.py, lancedb 0.40",
    tried=("lancedb 0.40.0",),
    write=with_bundle({"embed.py": _SCRIPT}),
    next_step="FOLDER/embed.py registers the function; its Python needs hdexport.",
)
