"""The chat template of a cross-encoder's pairs, rendered once: the bundle keeps the text around the two.

A template is a program. It is rendered with texts that are easy to find, and the text around them is kept; it must then
write other texts, which a program may treat differently, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from hdexport.support.json_files import shown
from hdruntime.bundle.sentence_settings import PairTemplate, Slot, TemplatePart, Wording
from hdruntime.errors import ModelError

MessageFormat = Literal["flat", "structured"]
"""Kinds of a message's content: a text, or a list of one."""

_SENTINELS: dict[Slot, str] = {"prompt": "Pr0mpt-7Kq", "query": "Qu3ry-2Xv", "document": "D0cument-9Lw"}
"""Texts that no template writes by itself."""

_TEXTS = (
    "",
    "word",
    "Several words, of them <b>some</b> &amp; 'others' \"quoted\"",
    "  spaces around  ",
    "\n\tlines\r\nand\n\nempty ones\n",
    "{{ messages }} {% if query %} {# none #} <|im_end|> </s>",
    "\u00c4rger, \u4e2d\u6587, e\u0301, \U0001f642",
    "0",
    "None",
    "yes",
    "https://example.org/a.html?b=c&d=%20",
    "long " * 5_000,
)
"""Texts that a template might change: cut, strip, escape, leave out."""

_NOT_RENDERED = (
    "common_kwargs",
    "max_length",
    "padding",
    "restore_suffix",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
"""Options of ``apply_chat_template`` in transformers, and of sentence-transformers, that no template reads."""

_ADVICE = (
    'A template that fits has both texts once, as they are: {{ messages | selectattr("role", "eq", "query") | '
    'map(attribute="content") | first }}, and the same of "document".'
)

_Render = Callable[[str, str, str], str]
"""(prompt, query, document) -> all of it."""


def pair_template(
    tokenizer: Any, *, file: Path, message_format: MessageFormat, options: Mapping[str, Any], prompts: Iterable[str]
) -> PairTemplate:
    """The text that a tokenizer's chat template writes for a pair, rendered with `options` as sentence-transformers
    does. A prompt is a message of the role ``system`` before the query's and the document's. A template that cannot be
    rendered, does not have both texts once, or treats some texts differently is refused; `file` has the settings, for
    messages."""
    wrong = [name for name in options if name in _NOT_RENDERED]
    if wrong:
        raise ModelError(
            f"{file} has processing_kwargs.chat_template.{wrong[0]} {shown(options[wrong[0]])}, which a bundle cannot "
            "honour.\nRemove it if the model gives the same scores without it."
        )

    if tokenizer.truncation_side != "right":
        raise ModelError(
            f"The tokenizer beside {file} has truncation_side {shown(tokenizer.truncation_side)}; pairs in a chat "
            "template are cut at the end.\nSet it to right in tokenizer_config.json, if they always fit."
        )

    def render(prompt: str, query: str, document: str) -> str:
        texts = {"system": prompt, "query": query, "document": document}
        messages = [
            {"role": role, "content": text if message_format == "flat" else [{"type": "text", "text": text}]}
            for role, text in texts.items()
            if text or role != "system"
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    try:
        plain = _wording(render("", _SENTINELS["query"], _SENTINELS["document"]))
    except Exception as error:
        # A template may raise any error.
        if isinstance(error, (MemoryError, ModelError)):
            raise
        raise ModelError(
            f"The chat template of the tokenizer beside {file} cannot write a pair: {shown(error)}\n{_ADVICE}"
        ) from error
    template = PairTemplate(plain=plain, prompted=_prompted(render))
    used = ["", *({*_TEXTS, *prompts} - {""} if template.prompted is not None else ())]
    for prompt in used:
        for query, document in zip(("", *_TEXTS, *_TEXTS), ("", *_TEXTS[1:], "", *_TEXTS), strict=True):
            _check(render, template, prompt, query, document)
    return template


def _prompted(render: _Render) -> Wording | None:
    """The text with a prompt; None where the template raises for one, as many do for the role ``system``."""
    try:
        rendered = render(*(_SENTINELS[slot] for slot in ("prompt", "query", "document")))
    except MemoryError:
        raise
    except Exception:
        return None
    return _wording(rendered, has_prompt=True)


def _wording(rendered: str, *, has_prompt: bool = False) -> Wording:
    counts = {slot: rendered.count(text) for slot, text in _SENTINELS.items()}
    # A prompt may be left out, which then changes nothing.
    if not has_prompt:
        counts["prompt"] = 0
    wrong = next((slot for slot, count in counts.items() if count > 1 or (count == 0 and slot != "prompt")), None)
    if wrong is not None:
        raise ModelError(
            f"The checkpoint's chat template writes the {wrong} of a pair {counts[wrong]} times; it must be there "
            f"once, as it is.\n{_ADVICE}"
        )
    slots = sorted((slot for slot, count in counts.items() if count), key=lambda slot: rendered.index(_SENTINELS[slot]))
    parts = []
    for slot in slots:
        before, _, rendered = rendered.partition(_SENTINELS[slot])
        parts.append(TemplatePart(before=before, slot=slot))
    return Wording(parts=tuple(parts), after=rendered)


def _check(render: _Render, template: PairTemplate, prompt: str, query: str, document: str) -> None:
    """Refuses a template that treats these texts differently from others."""
    try:
        rendered = render(prompt, query, document)
    except MemoryError:
        raise
    except Exception as error:
        rendered = f"{type(error).__name__}: {error}"
    if rendered != template.write(query, document, prompt=prompt).text:
        raise ModelError(
            "The checkpoint's chat template does not write all texts in the same way, and a bundle has only the text "
            f"around them: the query {shown(query)}, the document {shown(document)}, the prompt {shown(prompt)} "
            f"are written as {shown(rendered)}.\n{_ADVICE}"
        )
