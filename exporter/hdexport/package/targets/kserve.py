"""KServe: an InferenceService whose container is `hdexport serve`."""

from __future__ import annotations

from hdexport.package.files import write_bundle, write_text
from hdexport.package.target import Package, PackageTarget

_YAML = """# kubectl apply -f inferenceservice.yaml, after the bundle is at storageUri and the image of
# docker/cpu.Dockerfile, built with --build-arg EXTRAS=serve, is at IMAGE.
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: $name
spec:
  predictor:
    containers:
      - name: kserve-container
        image: IMAGE
        args: [serve, /mnt/models, --host, 0.0.0.0, --port, "8080", --max-seq-length, "$length"]
        env:
          - name: STORAGE_URI
            value: STORAGE_URI
        ports:
          - containerPort: 8080
            protocol: TCP
        readinessProbe:
          httpGet:
            path: /ready
            port: 8080
"""


def _write(package: Package) -> None:
    write_bundle(package, package.directory / "bundle")
    write_text(package, "inferenceservice.yaml", _YAML)


TARGET = PackageTarget(
    name="kserve",
    system="KServe",
    source="https://kserve.github.io/website/docs/model-serving/predictive-inference/frameworks/custom-predictor",
    write=_write,
    next_step="Put FOLDER/bundle at STORAGE_URI, then: kubectl apply -f FOLDER/inferenceservice.yaml",
    takes=frozenset({"name"}),
)
