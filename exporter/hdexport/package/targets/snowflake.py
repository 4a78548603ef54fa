"""Snowflake's model registry: a CustomModel that runs the bundle in hdexport's runtime."""

from __future__ import annotations

from hdexport.package.files import with_bundle
from hdexport.package.target import PackageTarget

_SCRIPT = '''"""$name in Snowflake's model registry: `python register.py`, with a connection in ~/.snowflake."""

from pathlib import Path

import pandas as pd
from snowflake.ml.model import custom_model, model_signature
from snowflake.ml.registry import Registry
from snowflake.snowpark import Session


class Embedder(custom_model.CustomModel):
    def __init__(self, context):
        super().__init__(context)
        import hdruntime

        self.session = hdruntime.load(context["bundle"], max_seq_length=$length)

    @custom_model.inference_api
    def embed(self, data: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"EMBEDDING": list(self.session.embed(data["TEXT"].tolist()))})


if __name__ == "__main__":
    context = custom_model.ModelContext(bundle=str(Path(__file__).parent / "bundle"))
    text = model_signature.FeatureSpec("TEXT", model_signature.DataType.STRING)
    vector = model_signature.FeatureSpec("EMBEDDING", model_signature.DataType.FLOAT, shape=($size,))
    Registry(Session.builder.getOrCreate()).log_model(
        Embedder(context),
        model_name="$name",
        pip_requirements=["hdexport"],
        target_platforms=["SNOWPARK_CONTAINER_SERVICES"],
        signatures={"embed": model_signature.ModelSignature(inputs=[text], outputs=[vector])},
    )
'''


TARGET = PackageTarget(
    name="snowflake",
    system="Snowflake",
    source="https://docs.snowflake.com/en/developer-guide/snowflake-ml/model-registry/bring-your-own-model-types",
    write=with_bundle({"register.py": _SCRIPT}),
    next_step="python FOLDER/register.py",
    takes=frozenset({"name"}),
)
