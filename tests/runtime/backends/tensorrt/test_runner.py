"""Batches of every shape through the TensorRT backend, on a simulated GPU."""

from __future__ import annotations

import dataclasses
import gc
import sys
from typing import Any

import pytest

from fakes import simulated_tensorrt
from fakes.machine import HIDDEN, Machine, MachineMaker, new_batch
from fakes.simulated_device import Code
from hdplugins.tensorrt import plugin_class
from hdruntime.bundle.manifest import Backend, ProfileShape
from hdruntime.constants import KERNELS_FOLDER
from hdruntime.errors import (
    BackendError,
    BackendUnavailableError,
    BundleCorruptError,
    InputError,
    MissingDependencyError,
    OutOfMemoryError,
)
from support.comparators import named_case

SEEDS = range(6)


def test_every_length_around_the_profiles_is_right(new_machine: MachineMaker) -> None:
    for batch in [1, 3, 4]:
        machine = new_machine()
        for tokens in [1, 15, 16, 17, 31, 32, 33, 47, 48, 128, 129, 199, 200]:
            with named_case(tokens):
                runner = machine.runner()
                for padding in ("none", "right", "left", "holes", "all"):
                    machine.run(runner, new_batch(batch, tokens, padding))


def test_a_batch_runs_in_the_smallest_shape_of_a_profile(new_machine: MachineMaker) -> None:
    for given, run in [((8, 32), (8, 32)), ((4, 200), (4, 200)), ((1, 33), (2, 48))]:
        with named_case(given, run):
            machine = new_machine()
            machine.run(machine.runner(), new_batch(*given))
            assert machine.trt.shapes_run == [run]


def test_limits_are_reported_and_larger_batches_refused(machine: Machine, new_machine: MachineMaker) -> None:
    assert new_machine(max_len=150).runner().max_len == 150, "a bundle may serve fewer tokens than its engine"
    runner = machine.runner()
    assert (runner.max_len, runner.max_in_flight, runner.max_padding(9)) == (200, 2, sys.maxsize)
    assert [runner.max_rows(tokens) for tokens in (1, 32, 33, 200, 201)] == [8, 8, 4, 4, 0]
    with pytest.raises(InputError, match="9 rows of 20 tokens; this engine accepts up to 8"):
        runner.start(new_batch(9, 20), [HIDDEN])
    with pytest.raises(InputError, match="201 tokens; this engine accepts 1 to 200"):
        runner.start(new_batch(1, 201), [HIDDEN])
    machine.run(runner, new_batch(8, 20))


def test_plugins_that_tensorrt_creates_with_a_context_find_their_kernels(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, found = machine.runner(graphs="off"), set()
    create = simulated_tensorrt.ICudaEngine.create_execution_context

    def creating(engine: Any, runtime_config: Any) -> Any:
        found.update(creator.kernels for creator in machine.trt.get_plugin_registry()._creators)
        return create(engine, runtime_config)

    monkeypatch.setattr(simulated_tensorrt.ICudaEngine, "create_execution_context", creating)
    machine.run(runner, new_batch(2, 20))
    assert found == {machine.bundle.path / KERNELS_FOLDER}


def test_closing_does_not_wait_for_threads_that_compile_and_log(new_machine: MachineMaker) -> None:
    machine = new_machine(variant="tensorrt_rtx")
    for options in ({}, {"kernel_specialization": "eager"}):
        runner = machine.runner(**options)
        machine.run(runner, new_batch(2, 20))
        assert len(machine.trt.living) == len(options)
        runner.close()
        gc.collect()
    assert machine.device.faults == []
    assert not machine.trt.living


def test_contexts_are_made_when_needed_and_once_per_profile(machine: Machine) -> None:
    runner = machine.runner(graphs="off")
    assert machine.trt.made == 0
    for tokens in (5, 20, 32):
        machine.run(runner, new_batch(1, tokens))
    assert machine.trt.made == 1
    for tokens in (200, 50, 7):
        machine.run(runner, new_batch(2, tokens))
    assert machine.trt.made == 2


def test_version_compatible_engines_run_on_the_lean_runtime(new_machine: MachineMaker) -> None:
    machine = new_machine(module="tensorrt_lean", version_compatible=True)
    runner = machine.runner(backend=Backend.TENSORRT_LEAN)
    assert runner.backend is Backend.TENSORRT_LEAN
    machine.run(runner, new_batch(2, 40))


def test_without_its_package_a_variant_names_the_command(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in ["tensorrt", "tensorrt_rtx"]:
        with named_case(variant):
            monkeypatch.setitem(sys.modules, variant, None)
            with pytest.raises(MissingDependencyError, match=f"'{variant}', which is not installed.\n.*pip install"):
                machine.runner(backend=Backend(variant))


def test_without_cuda_python_a_driver_or_the_gpu_the_error_gives_advice(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.device.failing["cuInit"] = Code.INVALID_VALUE
    with pytest.raises(BackendUnavailableError, match=r"does not offer GPU 0 here(.|\n)*nvidia-smi"):
        machine.runner()
    machine.device.failing.clear()
    with pytest.raises(BackendUnavailableError, match="GPU 7"):
        machine.runner(device=7)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(BackendUnavailableError, match=r"'cuda-bindings', which is not installed(.|\n)*pip install"):
        machine.runner()


def test_tensorrts_reason_for_not_loading_an_engine_is_shown(machine: Machine) -> None:
    for message, kind, told in [
        ("Version tag does not match", BackendError, r"tensorrt 9.9.9 cannot load .*: Version tag does not match\n"),
        ("Error Code 2: OutOfMemory (Requested size was 99 bytes.)", OutOfMemoryError, "out of memory: Error Code 2"),
    ]:
        with named_case(message, kind, told):
            machine.trt.trouble["deserialize"] = message
            with pytest.raises(kind, match=told) as raised:
                machine.runner()
            assert type(raised.value) is kind


def test_an_engine_of_other_types_is_refused(new_machine: MachineMaker) -> None:
    for options in [{"output_type": "HALF"}, {"input_type": "FLOAT"}]:
        machine = new_machine(**options)
        with pytest.raises(BundleCorruptError, match=r"the manifest of .* lists .*INT64|lists .*FLOAT"):
            machine.runner()


def test_an_engine_of_other_profiles_is_refused(new_machine: MachineMaker) -> None:
    machine = new_machine()
    listed = machine.bundle.manifest.engines[0]
    profiles = (ProfileShape(batch=(1, 1, 8), tokens=(1, 64, 64)),) * 2
    machine.with_manifest(engines=(dataclasses.replace(listed, profiles=profiles),))
    with pytest.raises(BundleCorruptError, match=r"the profiles .* of input_ids, but the manifest"):
        machine.runner()


def test_an_engine_whose_outputs_are_larger_than_the_manifests_is_refused(machine: Machine) -> None:
    (listed,) = machine.bundle.manifest.outputs
    machine.with_manifest(outputs=(dataclasses.replace(listed, shape=("batch", "tokens", 3)),))
    told = r"output last_hidden_state has shape \[2, 32, 4\] for .*by the manifest it is \[2, 32, 3\]"
    with pytest.raises(BackendError, match=told):
        machine.runner().start(new_batch(2, 20), [HIDDEN])


def test_a_failure_of_tensorrt_is_an_error_and_the_next_batch_runs(new_machine: MachineMaker) -> None:
    for trouble in ["context", "enqueue", "shape"]:
        with named_case(trouble):
            machine = new_machine()
            runner = machine.runner()
            before = new_batch(2, 20)
            in_flight = runner.start(before, [HIDDEN])
            machine.trt.trouble[trouble] = "the moon is full"
            # Lengths without a context or shape so far.
            tokens = {"context": 60, "enqueue": 30, "shape": 10}[trouble]
            with pytest.raises(BackendError, match="the moon is full"):
                runner.start(new_batch(2, tokens), [HIDDEN])
            machine.trt.trouble.clear()
            machine.check(before, in_flight())
            for seed in range(3):
                machine.run(runner, new_batch(2, tokens, seed=seed))


def test_an_error_of_a_plugin_is_raised_even_if_tensorrt_reports_success(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = machine.runner()
    monkeypatch.setattr(plugin_class, "_errors", plugin_class.deque(["SlidingWindowAttention: no kernel"], maxlen=16))
    with pytest.raises(BackendError, match=r"A plugin failed on .*: SlidingWindowAttention: no kernel"):
        runner.start(new_batch(2, 20), [HIDDEN])
    machine.run(runner, new_batch(2, 20))


def test_invalid_options_are_refused(machine: Machine) -> None:
    for options, message in [
        ({"graphs": "sometimes"}, "graphs is 'sometimes'; it must be one of 'auto', 'on', 'off'"),
        ({"max_graphs": 0}, "max_graphs is 0; it must be 1 or more"),
        ({"kernel_specialization": "eager"}, "kernel_specialization is for tensorrt_rtx, not tensorrt"),
    ]:
        with named_case(options, message), pytest.raises(InputError, match=message):
            machine.runner(**options)
