"""TensorRT's messages: errors for the next exception, others to `logging`."""

from __future__ import annotations

import logging

import pytest

from hdruntime.backends.tensorrt.engine import error_of
from hdruntime.backends.tensorrt.log import TensorRtLog, log_of
from hdruntime.errors import BackendError, OutOfMemoryError
from support.comparators import named_case


def test_messages_go_to_logging_by_their_severity(caplog: pytest.LogCaptureFixture) -> None:
    log = TensorRtLog()
    with caplog.at_level(logging.DEBUG):
        for severity in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
            log.write(severity, f"of {severity}")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "error: of INTERNAL_ERROR"),
        ("INFO", "error: of ERROR"),
        ("WARNING", "of WARNING"),
        ("DEBUG", "of INFO"),
    ]


def test_the_latest_errors_are_kept_once() -> None:
    log = TensorRtLog()
    for number in range(100):
        log.write("ERROR", str(number))
    assert log.take_errors() == tuple(map(str, range(84, 100)))
    assert log.take_errors() == ()


def test_tensorrt_rtx_writes_to_the_log() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'hdexport[rtx]'")
    log, logger = log_of(trt)
    assert log_of(trt) == (log, logger)
    logger.log(trt.ILogger.Severity.ERROR, "as TensorRT calls it")
    assert log.take_errors() == ("as TensorRT calls it",)


def test_a_lack_of_memory_is_distinguished_from_other_errors() -> None:
    for message, kind in [
        ("Error Code 2: OutOfMemory (Requested size was 1073741824 bytes.)", OutOfMemoryError),
        ("Error Code 1: Cuda Runtime (out of memory)", OutOfMemoryError),
        ("cudaErrorMemoryAllocation", OutOfMemoryError),
        ("std::bad_alloc", OutOfMemoryError),
        ("Error Code 3: API Usage Error (memory is not aligned)", BackendError),
        ("Error Code 1: Cuda Runtime (an illegal memory access was encountered)", BackendError),
    ]:
        with named_case(message, kind):
            log = TensorRtLog()
            log.write("ERROR", message)
            error = error_of(log, "TensorRT failed")
            assert type(error) is kind
            assert message in str(error)


def test_a_failure_without_a_message_names_the_log() -> None:
    assert "it gives no reason; its log may (logging, level INFO)" in str(error_of(TensorRtLog(), "TensorRT failed"))
