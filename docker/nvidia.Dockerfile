# Runs bundles on NVIDIA GPUs, by the driver of the host (NVIDIA Container Toolkit):
#   docker build --file docker/nvidia.Dockerfile --build-arg EXTRAS=rtx,hub --tag hdexport-nvidia .
#   docker run --rm --gpus all --volume "$PWD/bundle:/bundle:ro" --volume "$PWD:/work" hdexport-nvidia run /bundle texts.jsonl -o vectors.parquet
# An engine runs in the version of TensorRT that built it: `hdexport inspect` says which, and constraints.txt pins one.

FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
COPY plugins plugins
COPY runtime runtime
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# tensorrt, rtx or lean for engines of that kind; their wheels bring CUDA's libraries.
ARG EXTRAS=tensorrt,hub
# Further packages, such as gcsfs, by which Vertex AI's bundles are copied.
ARG PACKAGES=
COPY constraints.txt /tmp/constraints.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/hdexport-*.whl)[${EXTRAS}]" ${PACKAGES} \
    && useradd --uid 10001 --create-home hdexport
USER 10001
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HF_HOME=/home/hdexport/huggingface
# `serve` alone is how SageMaker and Vertex AI start a container: docs/hosting.md.
ENV HDEXPORT_BUNDLE=/opt/ml/model \
    HDEXPORT_HOST=0.0.0.0 \
    HDEXPORT_PORT=8080
EXPOSE 8080
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
WORKDIR /work
ENTRYPOINT ["hdexport"]
CMD ["--help"]
