"""MLflow's pyfunc: a Python model that runs the bundle in hdexport's runtime, and the lines that save it."""

from __future__ import annotations

from hdexport.package.files import with_bundle
from hdexport.package.target import PackageTarget

_SCRIPT = '''"""$name in MLflow: `python save.py OUTPUT`, mlflow.pyfunc.load_model(OUTPUT).predict(texts)."""

import sys
from pathlib import Path

import mlflow.pyfunc

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    mlflow.pyfunc.save_model(
        sys.argv[1],
        python_model=str(FOLDER / "model.py"),
        artifacts={"bundle": str(FOLDER / "bundle")},
        pip_requirements=["hdexport"],
    )
'''
_MODEL = '''"""The model, as code: MLflow runs this file."""

import mlflow
from mlflow.pyfunc import PythonModel


class Embedder(PythonModel):
    def load_context(self, context):
        import hdruntime

        self.session = hdruntime.load(context.artifacts["bundle"], max_seq_length=$length)

    def predict(self, context, model_input, params=None):
        texts = model_input if isinstance(model_input, list) else model_input.iloc[:, 0].tolist()
        return self.session.embed(texts)


mlflow.models.set_model(Embedder())
'''


TARGET = PackageTarget(
    name="mlflow",
    system="MLflow and Databricks Model Serving",
    source="https://mlflow.org/docs/latest/ml/model/models-from-code",
    tried=("mlflow-skinny 3.17.2",),
    write=with_bundle({"model.py": _MODEL, "save.py": _SCRIPT}),
    next_step="python FOLDER/save.py OUTPUT, then mlflow.pyfunc.load_model(OUTPUT)",
)
