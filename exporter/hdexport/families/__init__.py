"""The model families: one file or folder each, and the registry of them all."""

from __future__ import annotations

__all__ = ["SUPPORTED_MODEL_TYPES", "Family", "any_family", "convertible_model_types", "family_of"]

import ast
import importlib
import re
from pathlib import Path

from hdexport.model.family import Family, ModelClasses

_DECLARED = re.compile(r'model_types=(\("[^)]+\))')


def _modules() -> dict[str, str]:
    """Model type -> the module whose `FAMILY` declares it. The modules need PyTorch, so they are read, not imported."""
    folder, modules = Path(__file__).parent, {}
    for file in (*folder.glob("*.py"), *folder.glob("*/family.py")):
        declared = _DECLARED.search(file.read_text(encoding="utf-8"))
        if declared:
            module = ".".join(file.relative_to(folder).with_suffix("").parts)
            modules.update(dict.fromkeys(ast.literal_eval(declared[1]), module))
    return modules


_MODULE_OF_MODEL_TYPE = _modules()

SUPPORTED_MODEL_TYPES = tuple(sorted(_MODULE_OF_MODEL_TYPE))


def family_of(model_type: str) -> Family:
    """The family that a ``model_type`` belongs to, whose classes transformers knows from then on; for any other type
    one of models that are traced as they are."""
    module = _MODULE_OF_MODEL_TYPE.get(model_type)
    if module is None:
        return any_family(model_type)
    family: Family = importlib.import_module(f"hdexport.families.{module}").FAMILY
    if family.classes is not None:
        family.classes.register()
    return family


def any_family(model_type: str, classes: ModelClasses | None = None) -> Family:
    """The family of models that are traced as they are. `classes` are those of a checkpoint's own code; None for the
    library's."""
    # It needs PyTorch, as families do.
    from hdexport.families.any import route

    return route.any_family(model_type, classes)


def convertible_model_types() -> list[str]:
    """The model types whose attention can be exchanged for one of another kind."""
    return [name for name in SUPPORTED_MODEL_TYPES if family_of(name).why_not_converted is None]
