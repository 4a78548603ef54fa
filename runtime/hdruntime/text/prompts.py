"""The prompts that a model was trained with, and the choice of one."""

from __future__ import annotations

from collections.abc import Mapping

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError, Setting
from hdruntime.text.checks import plain_name

_QUERY, _DOCUMENT = ("query", "search_query"), ("document", "search_document", "passage", "corpus")

INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    "query": _QUERY,
    "search_query": _QUERY[::-1],
    "document": _DOCUMENT,
    "search_document": ("search_document", "document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""An input type of Voyage or Cohere -> the names that models give to the prompt for it, the first choice first."""


def prompts_of(manifest: Manifest) -> tuple[dict[str, str], str | None]:
    """A bundle's prompts by name, and the name of the default prompt or None.

    ``query`` and ``document`` are empty strings if the model does not define them.
    """
    settings = manifest.sentence
    return {"query": "", "document": ""} | (settings.prompts if settings else {}), (
        settings.default_prompt_name if settings else None
    )


def chosen_prompt(prompts: Mapping[str, str], default_name: str | None, *, name: str | None, prompt: str | None) -> str:
    """The prompt before every text: `prompt`, which may be empty, or else the prompt of a name; None for the default.

    Args:
        prompts, default_name: see `prompts_of`.
        name: name of a prompt; unknown names are rejected.
        prompt: text of a prompt.
    """
    name = default_name if name is None else plain_name(name)
    if prompt is not None or name is None:
        return prompt or ""
    if name not in prompts:
        raise InputError(
            parameter="prompt_name",
            value=name,
            accepted=f"one of {', '.join(map(repr, prompts))}",
            hint=("Or pass the prompt as text: ", Setting("prompt"), "."),
        )
    return prompts[name]


def prompt_name_of(prompts: Mapping[str, str], input_type: str) -> str | None:
    """The name of the prompt for an input type; None, which stands for the default prompt, if the model has none.

    The names of `INPUT_TYPES` are tried, in upper or lower case, first among the prompts that are not empty. Any other
    input type must be the name of a prompt.

    Args:
        prompts: see `prompts_of`.
        input_type: the name of a prompt, or a key of `INPUT_TYPES`; anything else is rejected.
    """
    input_type = plain_name(input_type)
    if input_type not in INPUT_TYPES:
        if input_type in prompts:
            return input_type
        accepted = ", ".join(map(repr, dict.fromkeys([*INPUT_TYPES, *prompts])))
        raise InputError(parameter="input_type", value=input_type, accepted=f"one of {accepted}")
    names = {name.lower(): name for name, prompt in sorted(prompts.items(), key=lambda item: bool(item[1]))}
    matching = [names[name] for name in INPUT_TYPES[input_type] if name in names]
    return next((name for name in matching if prompts[name]), next(iter(matching), None))
