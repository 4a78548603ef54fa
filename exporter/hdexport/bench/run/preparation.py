"""What cases need before they run, made in a process of its own: inputs, PyTorch's answers, what peers run.

``python -m hdexport.bench.run.preparation FILE.json`` prints ``{"artefact": ..., "remark": ..., "seconds": ...}`` as
its last line; a known error goes to stderr, and the exit code is 1.
"""

from __future__ import annotations

__all__ = ["expected_path", "inputs_path", "main", "prepare_command"]

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdexport.bench.measure.processes import own_output
from hdexport.bench.measure.subject import Subject
from hdexport.bench.peers import PEERS
from hdexport.bench.peers.inputs import Texts
from hdexport.bench.run.expected import write_rows
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import HdexportError
from hdruntime.whole_files import whole_file

if TYPE_CHECKING:
    from hdexport.verify.pytorch_reference import Reference


def prepare_command(subject: Subject, folder: Path, what: Mapping[str, Any]) -> list[str]:
    """The arguments, after Python itself, of a process that prepares something.

    Args:
        subject: the model.
        folder: where files go; one subject has one folder.
        what: JSON: ``{"kind": "inputs", "lengths": [...], "batches": [...]}``, all combinations;
            ``{"kind": "expected", "shapes": [[batch, tokens], ...]}``, after the inputs, one shape after the other;
            ``{"kind": "artefact", "peer": name, "device": "cpu" or "cuda"}``.
    """
    told = {"subject": {**dataclasses.asdict(subject), "bundle": str(subject.bundle)}, "folder": str(folder)}
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, prefix="prepare-", suffix=".json", encoding="utf-8", delete=False
    ) as file:
        json.dump(told | {"what": dict(what)}, file)
    return ["-m", "hdexport.bench.run.preparation", file.name]


def inputs_path(folder: Path, batch: int, tokens: int) -> Path:
    """Where a batch's inputs are: an ``.npz`` of int64 [batch, tokens] arrays."""
    return folder / f"inputs-{batch}x{tokens}.npz"


def expected_path(folder: Path, batch: int, tokens: int) -> Path:
    """Where PyTorch's outputs for that batch are: a folder of float32 arrays, a ``.npy`` file each."""
    return folder / f"expected-{batch}x{tokens}"


def main(argv: Sequence[str]) -> int:
    """Prepare what a file of `prepare_command` says.

    Returns:
        the exit code: 0 done, 1 a known error, whose message is on stderr.
    """
    told = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    subject = Subject(**{**told["subject"], "bundle": Path(told["subject"]["bundle"])})
    began = time.perf_counter()
    with own_output() as output:
        try:
            made = _prepare(subject, Path(told["folder"]), told["what"])
        except (HdexportError, OSError, MemoryError) as error:
            print(error if str(error) else "out of memory", file=sys.stderr)
            return 1
        print(
            json.dumps({"artefact": None, "remark": None, **made, "seconds": time.perf_counter() - began}), file=output
        )
    return 0


def _prepare(subject: Subject, folder: Path, what: Mapping[str, Any]) -> dict[str, str | None]:
    if what["kind"] == "inputs":
        _write_inputs(subject, folder, what["lengths"], what["batches"])
        return {}
    if what["kind"] == "expected":
        _write_expected(subject, folder, what["shapes"])
        return {}
    made = PEERS[what["peer"]].prepare(subject, folder, device=what.get("device", "cpu"))
    return {"artefact": str(made.artefact), "remark": made.remark}


def _write_inputs(subject: Subject, folder: Path, lengths: Sequence[int], batches: Sequence[int]) -> None:
    texts = Texts(open_bundle(subject.bundle, check_files=False))
    for batch in batches:
        for tokens in lengths:
            path = inputs_path(folder, batch, tokens)
            if not path.exists():
                with whole_file(path) as file:
                    # Its type stub takes the names of arrays for its own options.
                    np.savez(file, **texts.batch(batch, tokens))  # type: ignore[arg-type]


def _write_expected(subject: Subject, folder: Path, shapes: Sequence[Sequence[int]]) -> None:
    missing = [(batch, tokens) for batch, tokens in shapes if not expected_path(folder, batch, tokens).exists()]
    if not missing:
        return
    from hdexport.checkpoint import find_checkpoint
    from hdexport.verify.pytorch_reference import reference_of

    assert subject.checkpoint is not None
    bundle = open_bundle(subject.bundle, check_files=False)
    checkpoint = find_checkpoint(subject.checkpoint, allow_pickle=subject.allow_pickle)
    reference = reference_of(bundle, checkpoint, allow_pickle=subject.allow_pickle)
    for batch, tokens in missing:
        with np.load(inputs_path(folder, batch, tokens)) as file:
            inputs = {name: file[name] for name in file.files}
        write_rows(expected_path(folder, batch, tokens), _answers(reference, inputs, batch), batch=batch)


def _answers(
    reference: Reference, inputs: Mapping[str, npt.NDArray[np.int64]], batch: int
) -> Iterator[dict[str, npt.NDArray[np.float32]]]:
    # They are of one length and have no padding, so that alone they answer as together, whatever the attention is.
    for row in range(batch):
        outputs = reference.batch({name: ids[row : row + 1] for name, ids in inputs.items()})
        yield {name: values[0] for name, values in outputs.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
