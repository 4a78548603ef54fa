"""The files that hold a checkpoint's weights, and the weights in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.support.json_files import read_object, reject_pointer, shown
from hdruntime.errors import HdexportError, InputError, ModelError, Setting
from hdruntime.folders import require_readable
from hdruntime.optional import require

if TYPE_CHECKING:
    import torch

_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"

_TYPES_OF_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATING = frozenset(_TYPES_OF_SAFETENSORS.values())


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A weight as a file has it; `dtype` is PyTorch's where it is a floating-point number, else the file's
    name of it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_half(self) -> bool:
        """Whether the weight is in half precision."""
        return self.dtype in ("float16", "bfloat16")

    @property
    def is_floating(self) -> bool:
        """Whether the weight can be used as it is; weights of 8 bits need scales that are stored elsewhere."""
        return self.dtype in _FLOATING


def weight_files(directory: Path, *, allow_pickle: bool = False) -> tuple[Path, ...]:
    """The files that hold a directory's weights, safetensors before pickles, which must be allowed."""
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory} holds an adapter beside a model's weights, and it may be merged into them already.",
            hint="Remove adapter_config.json if it is; if not, merge it: PEFT's merge_and_unload(), then "
            "save_pretrained().",
        )
    for name in [_SAFETENSORS] + ([_PICKLE] if allow_pickle else []):
        if (directory / name).is_file():
            return (directory / name,)
        if (directory / f"{name}.index.json").is_file():
            return _files_of_index(directory / f"{name}.index.json", allow_pickle=allow_pickle)
    if next(directory.glob("*.bin"), None):
        raise pickles_rejected(directory)
    raise ModelError(f"{directory} holds no weights.", hint="It needs a model.safetensors; download the model again.")


def stored_weights(files: Iterable[Path]) -> dict[str, StoredWeight]:
    """Name -> type and shape of each weight; no weight is read."""
    weights: dict[str, StoredWeight] = {}
    for file in files:
        for name, weight in _headers(file).items():
            if name in weights:
                raise ModelError(
                    f"{file.parent} holds the weight {shown(name)} twice.", hint="Download the model again."
                )
            weights[name] = weight
    return weights


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The weights in a safetensors file or, checked to hold nothing else, in a pickle."""
    safetensors = require("safetensors")
    from safetensors.torch import load_file

    reject_pointer(file)
    if file.suffix != ".safetensors":
        return _unpickled(file, "cpu")
    try:
        weights: dict[str, torch.Tensor] = load_file(file)
    except (safetensors.SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error
    return weights


def _files_of_index(index: Path, *, allow_pickle: bool) -> tuple[Path, ...]:
    directory, file_of_weight = index.parent, read_object(index).get("weight_map")
    if not isinstance(file_of_weight, dict) or not all(isinstance(name, str) for name in file_of_weight.values()):
        raise ModelError(f"{index} has no weight_map of names of files.", hint="Download the model again.")
    names = sorted(set(file_of_weight.values()))
    missing = [name for name in names if Path(name).name != name or not (directory / name).is_file()]
    if missing or not names:
        listed = ", ".join(shown(Path(name)) for name in missing[:3]) or "all the files"
        raise ModelError(f"{directory} lacks {listed}, which {index.name} names.", hint="Download the model again.")
    for name in names:
        # The suffix decides how a file is read: a file that does not end in .safetensors is read as a pickle.
        if name.endswith(".bin") and not allow_pickle:
            raise pickles_rejected(directory)
        if not name.endswith((".safetensors", ".bin")):
            raise ModelError(
                f"{index} names {shown(name)}; weights are read from .safetensors files and, with ",
                Setting("allow_pickle", True),
                ", from .bin files.",
                hint="Convert the model to safetensors.",
            )
    return tuple(directory / name for name in names)


def pickle_rejected(file: Path) -> ModelError:
    """The error of a file of weights that is a pickle, which is not allowed."""
    return ModelError(
        f"{file} is a pickle, which can run code when it is read.",
        hint=("Convert it to safetensors, or, if you trust its origin, use ", Setting("allow_pickle", True), "."),
    )


def pickles_rejected(directory: Path) -> ModelError:
    """The error of a directory whose weights are a pickle that is not allowed."""
    return ModelError(
        f"{directory} holds its weights as a pickle (.bin), which can run code when it is read.",
        hint=("Convert it to safetensors, or, if you trust its origin, use ", Setting("allow_pickle", True), "."),
    )


def _headers(file: Path) -> dict[str, StoredWeight]:
    reject_pointer(file)
    safetensors = require("safetensors")
    if file.suffix != ".safetensors":
        return {
            name: StoredWeight(dtype=str(weight.dtype).removeprefix("torch."), shape=tuple(weight.shape))
            for name, weight in _unpickled(file, "meta").items()
        }
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredWeight(
                    dtype=_TYPES_OF_SAFETENSORS.get(part.get_dtype(), part.get_dtype()), shape=tuple(part.get_shape())
                )
                for name, part in slices.items()
            }
    except (safetensors.SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _unpickled(file: Path, device: str) -> dict[str, torch.Tensor]:
    import torch

    try:
        loaded = torch.load(file, map_location=device, weights_only=True)
        if not all(isinstance(name, str) and isinstance(weight, torch.Tensor) for name, weight in loaded.items()):
            raise TypeError("it holds other things than weights with names")
    except OSError as error:
        raise _unreadable(file, error) from error
    except Exception as error:
        # Unpickling a damaged file raises any error that its bytes happen to ask for.
        raise ModelError(
            f"{file} cannot be read as weights: {type(error).__name__}: {shown(error)}",
            hint="Download the model again.",
        ) from error
    return dict(loaded)


def _unreadable(file: Path, error: Exception) -> HdexportError:
    # safetensors says of a file without permission that it is missing.
    try:
        require_readable(file)
    except InputError as reason:
        return reason
    return ModelError(f"{file} cannot be read: {shown(error)}", hint="Download the model again.")
