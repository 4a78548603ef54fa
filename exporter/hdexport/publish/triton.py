"""A bundle as a model in a repository of Triton Inference Server, run by Triton's Python backend."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.constants import MANIFEST_FILE
from hdruntime.errors import InputError, Setting
from hdruntime.serve.triton_model import BUNDLE_FOLDER, tensors_of
from hdruntime.tasks.task import Pairs

_CONFIG_FILE = "config.pbtxt"
_VERSION = "1"

_HEADER = "# Written by hdexport package; with --force it replaces this file, too.\n"
"""The line that makes a directory one of ours; the configuration's format has such comments."""

_MODEL = '''"""hdexport's model for the Python backend."""

from hdruntime.serve.triton_model import TritonPythonModel  # noqa: F401
'''

_CONFIG = """backend: "python"
max_batch_size: 1024
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
{inputs}
output [ {{ name: "{output}" data_type: TYPE_FP32 dims: [ {size} ] }} ]
instance_group [ {{ kind: KIND_AUTO count: 1 }} ]
parameters [ {{ key: "backend" value: {{ string_value: "{backend}" }} }} ]
"""

_INPUT = 'input [ {{ name: "{name}" data_type: TYPE_STRING dims: [ 1 ] optional: {optional} }} ]'

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that are a plain directory and need no escapes in a URL."""


def package_for_triton(
    bundle: Bundle, repository: Path, *, name: str | None = None, backend: str = "auto", force: bool = False
) -> Path:
    """Write a model directory, whole or not at all: ``config.pbtxt``, ``1/model.py`` and the bundle, ``1/bundle``.

    Args:
        bundle: an opened bundle.
        repository: directory of models; created if it is missing, other models in it stay.
        name: of the model's directory, which clients use; default the bundle's.
        backend: as :func:`hdruntime.load` takes it.
        force: replace a model that this function wrote.

    Returns:
        the model's directory.

    Raises:
        InputError: the name is not valid, or the bundle's task has no answers of one size.
        OutputExistsError: a model of that name is there and may not be replaced.
        HdexportError: the directory cannot be written.
    """
    name = _checked_name(bundle.manifest.name if name is None else name, given=name is not None)
    tensors = tensors_of(bundle)
    inputs = {"TEXT": "false"}
    if tensors.pairs is not Pairs.REFUSED:
        inputs["TEXT_PAIR"] = "true" if tensors.pairs is Pairs.ALLOWED else "false"
    config = _CONFIG.format(
        inputs="\n".join(_INPUT.format(name=each, optional=optional) for each, optional in inputs.items()),
        output=tensors.name,
        size=tensors.size,
        backend=backend,
    )
    path = Path(repository) / name
    with staged_directory(path, _MODEL_DIRECTORY, force=force) as directory:
        for file in (MANIFEST_FILE, *bundle.manifest.files):
            target = directory / _VERSION / BUNDLE_FOLDER / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / file, target)
        (directory / _VERSION / "model.py").write_text(_MODEL, encoding="utf-8")
        (directory / _CONFIG_FILE).write_text(_HEADER + config, encoding="utf-8")
    return path


def _checked_name(name: str, *, given: bool) -> str:
    if _NAME.fullmatch(name):
        return name
    raise InputError(
        f"The {'name' if given else 'name of the bundle,'} {name!r} is not valid for a model: use letters, digits, "
        "'.', '_' and '-', beginning with a letter or digit.",
        hint=("Name it, for example ", Setting("name", "encoder"), "."),
    )


def _is_ours(directory: Path) -> bool:
    try:
        with (directory / _CONFIG_FILE).open(encoding="utf-8") as file:
            return file.readline() == _HEADER
    except (OSError, UnicodeDecodeError):
        return False


def _other_files(directory: Path) -> list[str]:
    bundle = f"{_VERSION}/{BUNDLE_FOLDER}/"
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    ours = {_CONFIG_FILE, f"{_VERSION}/model.py"}
    # Python compiles the model's file beside it.
    return sorted(
        path for path in paths if path not in ours and not path.startswith((bundle, f"{_VERSION}/__pycache__"))
    )


_MODEL_DIRECTORY = DirectoryKind(
    name="Triton model of hdexport",
    marker=_CONFIG_FILE,
    is_one=_is_ours,
    other_files=_other_files,
    other_place=("choose another name with ", Setting("name")),
    other_parent=("choose another directory with ", Setting("triton")),
)
