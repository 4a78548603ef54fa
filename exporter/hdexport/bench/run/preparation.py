"""Files that cases need, each made in a process of its own before they run: inputs, PyTorch's answers, artefacts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.bench.measure.case import MeasuredModel
from hdexport.bench.peers import PEERS
from hdexport.bench.peers.inputs import Texts
from hdexport.bench.peers.peer import Prepared
from hdruntime.arrays import FloatArray
from hdruntime.bundle.reader import open_bundle
from hdruntime.whole_files import whole_file

if TYPE_CHECKING:
    from hdexport.verify.pytorch_reference import Reference


def inputs_path(folder: Path, batch: int, tokens: int) -> Path:
    """The file of a batch's inputs: an ``.npz`` of int64 [batch, tokens] arrays."""
    return folder / f"inputs-{batch}x{tokens}.npz"


def expected_path(folder: Path, batch: int, tokens: int) -> Path:
    """The folder of PyTorch's outputs for that batch: float32 arrays, a ``.npy`` file each."""
    return folder / f"expected-{batch}x{tokens}"


def write_inputs(subject: MeasuredModel, folder: Path, shapes: Sequence[tuple[int, int]]) -> None:
    """Write the inputs of every (batch, tokens)."""
    texts = Texts(open_bundle(subject.bundle, check_files=False))
    for batch, tokens in shapes:
        with whole_file(inputs_path(folder, batch, tokens)) as file:
            # Its type stub takes the names of arrays for its own options.
            np.savez(file, **texts.batch(batch, tokens))  # type: ignore[arg-type]


def write_expected(subject: MeasuredModel, folder: Path, shapes: Sequence[tuple[int, int]]) -> None:
    """Write PyTorch's outputs for those inputs, one shape after the other."""
    from hdexport.checkpoint import find_checkpoint
    from hdexport.verify.pytorch_reference import reference_of

    assert subject.checkpoint is not None
    bundle = open_bundle(subject.bundle, check_files=False)
    checkpoint = find_checkpoint(subject.checkpoint, trust=subject.trust)
    reference = reference_of(bundle, checkpoint)
    for batch, tokens in shapes:
        with np.load(inputs_path(folder, batch, tokens)) as file:
            inputs = {name: file[name] for name in file.files}
        write_rows(expected_path(folder, batch, tokens), _answers(reference, inputs, batch), batch=batch)


def write_rows(path: Path, rows: Iterable[Mapping[str, FloatArray]], *, batch: int) -> None:
    """Write a folder of ``.npy`` files, one a name: float32 [batch, ...] arrays. It appears whole or not at all.

    Memory does not grow with the batch.

    Args:
        rows: outputs of one text each, name -> array without the batch axis; `batch` of them.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        folder = Path(scratch) / "rows"
        folder.mkdir()
        for number, row in enumerate(rows):
            for name, values in row.items():
                # Mapped again for each row: mapped pages count as memory of the process.
                new = {"mode": "w+", "dtype": np.float32, "shape": (batch, *values.shape)}
                array = np.lib.format.open_memmap(folder / f"{name}.npy", **({"mode": "r+"} if number else new))
                array[number] = values
        folder.rename(path)


def make_artefact(subject: MeasuredModel, folder: Path, peer: str, device: str) -> Prepared:
    """A peer's artefact."""
    return PEERS[peer].prepare(subject, folder, device=device)


def _answers(
    reference: Reference, inputs: Mapping[str, npt.NDArray[np.int64]], batch: int
) -> Iterator[dict[str, npt.NDArray[np.float32]]]:
    # All rows are of one length and have no padding: alone they answer as together, whatever the attention is.
    for row in range(batch):
        outputs = reference.batch({name: ids[row : row + 1] for name, ids in inputs.items()})
        yield {name: values[0] for name, values in outputs.items()}
