"""The prompts that a model was trained with, and the choice of one."""

from __future__ import annotations

from collections.abc import Mapping

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError, Setting
from hdruntime.text.checks import plain_name


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
