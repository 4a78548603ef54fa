"""What holds for every test."""

import gc
import logging
import os
import re
import signal
import sys

import hypothesis
import pytest

import hdruntime  # noqa: F401 - before any test imports ONNX Runtime, whose telemetry it switches off
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdplugins.tensorrt.link import provide_library_link
from hdruntime.gpu.driver import gpus
from support.repeated_exports import one_table_of_operators, quiet_pytorch  # noqa: F401 fixtures

# Before any test imports OpenVINO by itself; see hdruntime.optional.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

# Two test processes share two cores, and the threads that PyTorch would start spin. Before torch is imported, and in
# the environment, so that commands under test inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control starts what runs in the background, and nohup what it runs, with Ctrl-C ignored, and every
# child inherits that. Tests press Ctrl-C on children, which have it from us as from a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example, or of making its inputs, is that of the machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Before any test imports TensorRT-RTX, whose parser cannot use plugins otherwise.
provide_library_link()


def pytest_configure(config):
    """Children of tests have the allocator of every process, whose memory some tests measure: see the Makefile."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"):
            os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage is looked for among what tests make, not among a million objects of libraries, each time anew.

    Collecting imports PyTorch, transformers and more, whose objects stay.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)  # a trace makes millions of objects, few of them in cycles
        gc.enable()


def pytest_sessionfinish():
    """pytest looks for garbage five times in a row, for exceptions in it: once is enough for CPython."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Tests marked ``gpu`` are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not gpus():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU here"))


@pytest.fixture(scope="session", autouse=True)
def _sessions_of_one_thread():
    """ONNX Runtime's threads spin while they wait, and test processes share the cores. A test may ask for threads."""
    import onnxruntime

    from hdruntime.backends.onnxruntime import sessions as onnxruntime_sessions
    from hdruntime.process_limits import chosen_threads

    class OneThread(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", OneThread)
        patch.setattr(onnxruntime_sessions, "chosen_threads", lambda asked: chosen_threads(asked or 1))
        yield


@pytest.fixture(autouse=True)
def _levels_of_our_loggers():
    """Every test leaves them as Python has them, whatever command it has run in this process.

    At its end: what the next module shares is made before that module's first test begins.
    """
    yield
    for package in ("hdexport", "hdruntime", "hdplugins"):
        if logging.getLogger(package).level != logging.NOTSET:
            logging.getLogger(package).setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _variables_of_the_environment():
    """What a command sets that runs in this process ends with its test: Triton interprets kernels by a variable."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


_MODEL_TYPE = re.compile(rf"[\[-]({'|'.join(sorted(SUPPORTED_MODEL_TYPES, key=len, reverse=True))})\b")

_SHARED_PROCESS = re.compile(
    r"tests/plugins/\w+/test_\w+_(kernel|plugin)\.py|tests/cli/test_(?:build|extend|process|run_survival)\.py"
)
"""Files that share a process: one in which Triton interprets kernels, or one that forks commands."""

_SECONDS = {
    "tests/runtime/test_aarch64.py": 600,
    "fork": 40,
    "tests/runtime/test_ray.py": 40,
    "kernel": 30,
    "modernbert": 25,
    "tests/exporter/graph/targets/test_lowering_onnxruntime_cpu.py": 25,
    "tests/plugins/attention/test_sparse_attention.py": 25,
    "bert": 20,
    "tests/cli/test_bench.py": 20,
    "tests/runtime/test_multi_vector_encoder.py": 20,
    "longformer": 15,
    "tests/cli/test_rebuild.py": 15,
    "tests/examples/test_examples.py": 15,
    "tests/exporter/attention/test_openvino_attention_types.py": 15,
    "tests/exporter/graph/targets/test_lowering_openvino.py": 15,
    "tests/exporter/bench/test_baselines.py": 15,
    "tests/exporter/tune/test_tune.py": 15,
    "tests/plugins/kernels/test_shipped_kernels.py": 15,
    "tests/runtime/test_serve.py": 15,
    "big_bird": 10,
    "plugin": 10,
    "roberta": 10,
    "t5": 10,
    "tests/cli/test_run_arriving.py": 10,
    "tests/exporter/attention/test_converted_blocks.py": 10,
    "tests/exporter/attention/test_reformer.py": 10,
    "tests/exporter/checkpoint/test_tokenizer_ids.py": 10,
    "tests/exporter/graph/targets/test_engine.py": 10,
    "tests/exporter/verify/test_wrong_graphs.py": 10,
    "tests/runtime/jobs/test_folder.py": 10,
    "tests/runtime/test_chat_embedders.py": 10,
    "tests/runtime/test_chat_rerankers.py": 10,
    "tests/runtime/test_serve_http.py": 10,
    "tests/runtime/test_sparse_encoder.py": 10,
}
"""Scope of the scheduler -> about how many seconds it takes on a core; others but families take fewer than ten."""

_SECONDS_OF_FAMILY = 5


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of a family, of files that share a process, and else of a file run on one worker, which makes things once.

    Whatever has most work begins first, so that workers end together. The marks of ``--dist loadgroup`` would say what
    runs together, but pytest 9.2 ignores how xdist 3.8 passes them on.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFamilyOrFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            family = _MODEL_TYPE.search(nodeid)
            shared = _SHARED_PROCESS.match(nodeid)
            if shared:
                return shared[1] or "fork"
            return family[1] if family else nodeid.partition("::")[0]

        def _assign_work_unit(self, node: object) -> None:
            if not shuffled:
                self.workqueue.move_to_end(max(self.workqueue, key=self._work), last=False)
            super()._assign_work_unit(node)

        def _work(self, scope: str) -> float:
            few = min(len(self.workqueue[scope]) / 100, 9.0)
            return _SECONDS.get(scope, _SECONDS_OF_FAMILY if scope in SUPPORTED_MODEL_TYPES else few)

    config.option.loadscopereorder = False  # by the number of tests
    shuffled = not config.getoption("random_order_seed", "default:").startswith("default:")
    return ByFamilyOrFile(config, log)
