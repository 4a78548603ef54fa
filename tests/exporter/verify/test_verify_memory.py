"""A verification holds one case's answers at a time, and compares logits that do not fit at some tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hdexport.attention.blocks.conversion import bigbird
from hdexport.attention.window import Window, WindowAttention
from hdexport.checkpoint import find_checkpoint
from hdexport.cli.verification_table import outcome_line
from hdexport.verify import Check, Grid, Verification, verification, verify_bundle
from hdexport.verify.case_memory import arrays_bytes
from hdexport.verify.expected import sampled_tokens
from hdexport.verify.graph_sets import opened
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.verification import Case, Skip, SkipCause
from support.tampered_bundles import tampered
from support.verified import Recorder


def reference_for(bundle) -> Reference:
    return reference_of(open_bundle(bundle.path), find_checkpoint(bundle.checkpoint))


class Answers:
    """Counts the arrays that are alive of those that passed by."""

    def __init__(self) -> None:
        self._known: list[weakref.ref] = []

    def add(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for array in arrays.values():
            self._known.append(weakref.ref(array))
        return arrays

    @property
    def alive(self) -> int:
        return sum(known() is not None for known in self._known)


def test_no_answer_outlives_its_case(tiny_bundles, monkeypatch) -> None:
    bundle = tiny_bundles("bert")
    reference, from_pytorch, from_graphs = reference_for(bundle), Answers(), Answers()
    alive: dict[str, list[int]] = {"pytorch": [], "graphs": []}
    unpadded, compare = Reference.unpadded, verification.compare_case

    def asked(*args, **options) -> dict[str, np.ndarray]:
        alive["pytorch"].append(from_pytorch.alive)
        return from_pytorch.add(unpadded(*args, **options))

    def compared(graph, case, manifest, expected, got, samples, **options):
        alive["graphs"].append(from_graphs.alive)
        return compare(graph, case, manifest, expected, from_graphs.add(got), samples, **options)

    monkeypatch.setattr(Reference, "unpadded", asked)
    monkeypatch.setattr(verification, "compare_case", compared)
    found = verify_bundle(open_bundle(bundle.path), reference, grid=Grid.QUICK)
    assert found.passed
    assert len(alive["pytorch"]) > 10
    # A case has up to three rows; when the last is asked for, the other two are there, and nothing else.
    assert max(alive["pytorch"]) == 2
    assert max(alive["graphs"]) == 0
    assert (from_pytorch.alive, from_graphs.alive) == (0, 0)


def test_the_weights_of_one_model_are_in_memory_at_a_time(tiny_bundles, monkeypatch) -> None:
    bundle = tiny_bundles("bert")
    monkeypatch.setattr("hdexport.model.half_weights.MIN_MODEL_BYTES", 1)
    reference, is_open = reference_for(bundle), []
    module = weakref.ref(reference._module)

    @contextlib.contextmanager
    def counted(read, graphs, changes):
        is_open.append(graphs)
        gc.collect()
        assert module() is None
        assert len(is_open) == 1
        with opened(read, graphs, changes) as yielded:
            yield yielded
        is_open.remove(graphs)

    monkeypatch.setattr(verification, "opened", counted)
    checks = verify_bundle(open_bundle(bundle.path), reference, grid=Grid.QUICK).checks
    assert {check.graph for check in checks} == {"model.onnx", "onnxruntime_cpu.onnx"}
    assert reference.model.config.model_type == "bert"  # loaded again


def test_logits_over_a_large_vocabulary_take_gigabytes_and_samples_do_not(tiny_bundles) -> None:
    right = tiny_bundles("bert", "fill-mask").manifest
    outputs = (dataclasses.replace(right.outputs[0], shape=("batch", "tokens", 250_002)),)
    manifest = dataclasses.replace(right, outputs=outputs, hidden_size=768)
    case = Case(tokens=4096, lengths=(4096,), padding="none")
    assert arrays_bytes(case, manifest) == 3 * 4096 * 250_002 * 4  # 12 GB
    assert arrays_bytes(case, manifest, samples=16) < 100 * 2**20


LIMIT_BYTES = 12 * 2**20
"""Too little for the logits of 65 tokens over `VOCAB_SIZE` ids; enough for a few of them, and for all else. Of texts of
66 tokens in the quick grid all but 9 are padding, for which PyTorch has no logits: they fit."""

VOCAB_SIZE = 20_000

FILES = ("model.onnx", "onnxruntime_cpu.onnx")


@pytest.fixture
def with_vocabulary(tiny_bundles):
    """A bundle for masks whose logits over a vocabulary are most of its memory."""
    return tiny_bundles("bert", "fill-mask", vocab_size=VOCAB_SIZE)


def verified(bundle, path: Path | None = None) -> tuple[Verification, list[Check | Skip]]:
    progress = Recorder()
    opened = open_bundle(path or bundle.path)
    options = {"grid": Grid.QUICK, "limit_bytes": LIMIT_BYTES, "progress": progress}
    return verify_bundle(opened, reference_for(bundle), **options), progress.outcomes


def test_logits_that_do_not_fit_are_compared_at_some_tokens_and_reported(with_vocabulary) -> None:
    found, outcomes = verified(with_vocabulary)
    assert found.passed
    assert [(skip.graph, skip.cause) for skip in found.skipped] == [("onnxruntime_cuda.onnx", SkipCause.NO_GPU)]
    sampled = [check for check in found.checks if check.samples is not None]
    assert {(check.graph, check.case.padding) for check in sampled} == {
        (file, padding) for file in FILES for padding in ("none", "right", "left")
    }
    for check in sampled:
        assert set(check.outputs) == {"logits", "head_input"}
        assert 0 < check.samples < 25
        assert f"  logits at {check.samples} tokens, their input at all" in outcome_line(check)
    assert {check.case.tokens for check in found.checks if check.samples is None} == {1, 2, 66}
    assert sum("their input at all" in outcome_line(outcome) for outcome in outcomes) == len(sampled)
    assert {case.tokens for case in found.record().graphs["model.onnx"].sampled} == {65, 300}


def test_a_wrong_vocabulary_shows_at_some_tokens(with_vocabulary, tmp_path) -> None:
    def change_the_last_bias(model: ir.Model) -> None:
        value = next(value for name, value in model.graph.initializers.items() if "decoder.bias" in name)
        values = value.const_value.numpy().copy()
        values[-1] += 1e-3
        value.const_value = ir.tensor(values, name=value.name)

    found, _ = verified(with_vocabulary, tampered(with_vocabulary, tmp_path / "bundle", change_the_last_bias, *FILES))
    sampled = [check for check in found.checks if check.samples is not None]
    assert sampled
    for check in sampled:
        assert not check.outputs["logits"].passed
        assert check.outputs["head_input"].passed


def test_samples_are_real_tokens_of_every_row_and_around_the_checkpoints_positions() -> None:
    samples = sampled_tokens(Case(tokens=300, lengths=(225, 300, 1), padding="left"), 64)
    assert {0, 63, 64, 75, 299} <= set(samples)
    assert (np.diff(samples) > 0).all()
    assert set(sampled_tokens(Case(tokens=1, lengths=(1,), padding="none"), 64)) == {0}


def test_a_case_that_does_not_fit_is_reported_with_its_size(with_vocabulary, tmp_path) -> None:
    def multiply(model: ir.Model) -> None:
        # A head that is more than a projection, a bias and a cast cannot be taken apart.
        one = ir.node("Constant", [], attributes={"value": ir.tensor(np.float32(1))})
        right = model.graph.outputs[0]
        product = ir.node("Mul", [right, one.outputs[0]])
        model.graph.extend([one, product])
        product.outputs[0].shape, product.outputs[0].type = right.shape, right.type
        right.name, product.outputs[0].name = "right", "logits"
        model.graph.outputs[0] = product.outputs[0]

    found, outcomes = verified(with_vocabulary, tampered(with_vocabulary, tmp_path / "bundle", multiply, *FILES))
    assert found.passed
    assert {check.case.tokens for check in found.checks} == {1, 2, 66}
    case = Case(tokens=300, lengths=(300,))
    (skip,) = [each for each in found.record().skipped if (each.graph, each.case) == ("model.onnx", case)]
    assert (skip.cause, skip.limit) == (SkipCause.MEMORY, LIMIT_BYTES)
    assert skip in outcomes
    said = "SKIP  model.onnx, batch 1, 300 tokens, padding none: outputs and attention scores take 0.067 GiB, limit "
    assert outcome_line(skip).startswith(said)


class LargestTensor(TorchDispatchMode):
    """Knows the values of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.values = max(self.values, tensor.numel())
        return made


SPARSE = {
    "windows": WindowAttention(layers=(16, 16), converted=Window(tokens=16, global_tokens=2, dilation=(1, 1, 2, 3))),
    "blocks": dataclasses.replace(bigbird(block_size=4, random_blocks=2), converted=True),
}


@pytest.mark.parametrize("attention", SPARSE)
def test_the_reference_of_sparse_attention_never_holds_all_pairs(tiny_bundles, monkeypatch, attention: str) -> None:
    dense = tiny_bundles("bert")
    # The reference attends as the manifest says, whatever the graphs compute.
    manifest = dataclasses.replace(dense.manifest, attention=(msgspec.to_builtins(SPARSE[attention]),))
    reference = reference_of(Bundle(dense.path, manifest), find_checkpoint(dense.checkpoint))
    whole = reference.unpadded(0, 300)["last_hidden_state"]
    monkeypatch.setattr("hdexport.attention.reference_attention._SLICE_VALUES", 2**15)
    with LargestTensor() as largest:
        sliced = reference.unpadded(0, 300)["last_hidden_state"]
    np.testing.assert_allclose(sliced, whole, atol=2e-6)
    assert largest.values < 300 * 300  # one head's pairs; there are four heads


def test_graphs_with_decisions_whose_weights_do_not_fit_are_skipped_and_reported(tiny_bundles) -> None:
    bundle, progress = tiny_bundles("reformer"), Recorder()
    weights = 4 * bundle.manifest.parameters
    opened, reference = open_bundle(bundle.path), reference_for(bundle)
    assert verify_bundle(opened, reference, grid=Grid.QUICK, memory_bytes=weights).passed
    found = verify_bundle(opened, reference, grid=Grid.QUICK, memory_bytes=weights - 1, progress=progress)
    assert not found.passed
    skipped = [each for each in found.skipped if each.cause is SkipCause.WEIGHTS]
    assert [(each.graph, each.needed, each.limit) for each in skipped] == [
        (name, weights, weights - 1) for name in ("model.onnx", "onnxruntime_cpu.onnx")
    ]
    assert "a session takes" in outcome_line(skipped[0])
