# Runs bundles on CPUs, without PyTorch and compilers:
#   docker build --file docker/cpu.Dockerfile --tag hdexport .
#   docker run --rm --volume "$PWD/bundle:/bundle:ro" --volume "$PWD:/work" hdexport run /bundle texts.jsonl -o vectors.parquet
# /work has to be writable for the user 10001, or for the one of --user "$(id -u):$(id -g)".

FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
COPY plugins plugins
COPY runtime runtime
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# Extras of the runtime: hub (bundles by name), openvino (bfloat16), ray, serve.
ARG EXTRAS=hub
# Further packages, such as gcsfs, by which Vertex AI's bundles are copied.
ARG PACKAGES=
COPY constraints.txt /tmp/constraints.txt
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/hdexport-*.whl)[${EXTRAS}]" ${PACKAGES} \
    && useradd --uid 10001 --create-home hdexport
USER 10001
ENV HF_HOME=/home/hdexport/huggingface
# `serve` alone is how SageMaker and Vertex AI start a container: docs/hosting.md.
ENV HDEXPORT_BUNDLE=/opt/ml/model \
    HDEXPORT_HOST=0.0.0.0 \
    HDEXPORT_PORT=8080
EXPOSE 8080
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
WORKDIR /work
ENTRYPOINT ["hdexport"]
CMD ["--help"]
