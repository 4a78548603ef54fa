"""The prompts that a model was trained with, and the choice of one."""

from __future__ import annotations

from collections.abc import Mapping

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError
from hdruntime.text.checks import plain_name


def prompts_of(manifest: Manifest) -> tuple[dict[str, str], str | None]:
    """A bundle's prompts by name, and the name of the default prompt; None for no prompt.

    ``query`` and ``document`` are empty if the model does not define them.
    """
    settings = manifest.sentence
    return {"query": "", "document": ""} | (settings.prompts if settings else {}), (
        settings.default_prompt_name if settings else None
    )


def chosen_prompt(prompts: Mapping[str, str], default_name: str | None, *, name: str | None, prompt: str | None) -> str:
    """The prompt before every text: `prompt` itself, which may be empty, or else that of a `name`, None being the
    default's.

    `prompts` and `default_name` are of `prompts_of`. A name that no prompt has is refused.
    """
    name = default_name if name is None else plain_name(name)
    if prompt is not None or name is None:
        return prompt or ""
    if name not in prompts:
        raise InputError(
            f"There is no prompt {name!r}; this bundle has {', '.join(prompts)}.",
            hint="Name one of them, or give hdruntime or hdexport run the prompt itself (prompt, --prompt).",
        )
    return prompts[name]
