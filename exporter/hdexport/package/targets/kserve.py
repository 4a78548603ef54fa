"""KServe: an InferenceService whose container is `hdexport serve`, with the Open Inference Protocol under its name."""

from __future__ import annotations

from hdexport.package.files import with_bundle
from hdexport.package.target import PackageTarget
from hdruntime.bundle.manifest import Task

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
        args: [serve, $name=/mnt/models, --host, 0.0.0.0, --port, "8080", --max-seq-length, "$length"]
        env:
          - name: STORAGE_URI
            value: STORAGE_URI
        ports:
          - containerPort: 8080
            protocol: TCP
        readinessProbe:
          httpGet:
            path: /v2/models/$name/ready
            port: 8080
"""


TARGET = PackageTarget(
    name="kserve",
    system="KServe",
    source="https://kserve.github.io/website/docs/model-serving/predictive-inference/frameworks/custom-predictor",
    write=with_bundle({"inferenceservice.yaml": _YAML}),
    tried=("kserve 0.21.0 (its client)",),
    next_step="Put FOLDER/bundle at STORAGE_URI, then: kubectl apply -f FOLDER/inferenceservice.yaml; texts go to "
    "POST /v2/models/NAME/infer.",
    tasks=frozenset(Task),
    takes=frozenset({"name"}),
    names=r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
)
