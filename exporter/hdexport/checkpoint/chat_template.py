"""The chat template of a cross-encoder's pairs or of an embedder's texts, rendered once: the bundle keeps the text
around them.

A template is a program. It is rendered with texts that are easy to find, and the text around them is kept; it must then
write other texts, which a program may treat differently, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hdexport.support.json_files import shown
from hdruntime.bundle.sentence_settings import PairTemplate, Slot, TemplatePart, TextTemplate, Wording
from hdruntime.errors import ModelError

MessageFormat = Literal["flat", "structured"]
"""Kinds of a message's content: a text, or a list of one."""

_SENTINELS: dict[Slot, str] = {
    "prompt": "Pr0mpt-7Kq",
    "query": "Qu3ry-2Xv",
    "document": "D0cument-9Lw",
    "text": "T3xt-5Mn",
}
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

_OF_PAIRS: tuple[Slot, ...] = ("query", "document")

_ROLES: dict[Slot, str] = {"prompt": "system", "text": "user"}
"""Slot -> role of its message, where the two differ."""

_HINT_FOR_PAIRS = (
    'A template that fits has both texts once, as they are: {{ messages | selectattr("role", "eq", "query") | '
    'map(attribute="content") | first }}, and the same of "document".'
)

_HINT_FOR_TEXTS = (
    'A template that fits has the text once, as it is: {{ messages | selectattr("role", "eq", "user") | '
    'map(attribute="content") | first }}.'
)

_Render = Callable[..., str]
"""(prompt, query, document), or (prompt, text) -> all of it."""


def pair_template(
    tokenizer: Any, *, file: Path, message_format: MessageFormat, options: Mapping[str, Any], prompts: Iterable[str]
) -> PairTemplate:
    """The text that a tokenizer's chat template writes for a pair, rendered with `options` as sentence-transformers
    does. A prompt is a message of the role ``system`` before the query's and the document's. A template that cannot be
    rendered, does not have both texts once, or treats some texts differently is rejected; `file` has the settings, for
    messages."""
    render = _render_of(tokenizer, _OF_PAIRS, file, message_format, options)
    template = PairTemplate(plain=_plain(render, _OF_PAIRS, file), prompted=_prompted(render, _OF_PAIRS))
    pairs = list(zip(("", *_TEXTS, *_TEXTS), ("", *_TEXTS[1:], "", *_TEXTS), strict=True))
    _check_all(render, template, prompts, pairs)
    _reject_date(tokenizer, render, _OF_PAIRS, file, message_format, options)
    return template


def text_template(
    tokenizer: Any, *, file: Path, message_format: MessageFormat, options: Mapping[str, Any], prompts: Iterable[str]
) -> TextTemplate:
    """The text that a tokenizer's chat template writes for an embedder's text, a message of the role ``user``; the rest
    is as of `pair_template`. The template may leave out the spaces around texts."""
    render = _render_of(tokenizer, ("text",), file, message_format, options)
    plain = _plain(render, ("text",), file)
    spaced = f"\t\n {_SENTINELS['text']} \n\t"
    strips = spaced not in render("", spaced)
    template = TextTemplate(plain=plain, prompted=_prompted(render, ("text",)), strips=strips)
    texts = [(text,) for text in _TEXTS]
    for task in ("query", "document"):
        # The library names the task of encode_query and encode_document.
        of_task = _render_of(tokenizer, ("text",), file, message_format, {"task": task, **options})
        if any(_rendered(of_task, "", *each) != _rendered(render, "", *each) for each in texts):
            raise ModelError(
                f"The chat template of the tokenizer beside {file} writes a {task} in another way than a text, and a "
                f"bundle has one template.",
                hint=_HINT_FOR_TEXTS,
            )
    _check_all(render, template, prompts, texts)
    _reject_date(tokenizer, render, ("text",), file, message_format, options)
    return template


def _reject_date(
    tokenizer: Any,
    render: _Render,
    slots: Sequence[Slot],
    file: Path,
    message_format: MessageFormat,
    options: Mapping[str, Any],
) -> None:
    """Reject a template that writes today's date: a bundle would keep the date of its build."""
    # A variable of the template goes before transformers' function of the same name.
    of_another_day = _render_of(tokenizer, slots, file, message_format, {**options, "strftime_now": lambda _: "a day"})
    texts = _TEXTS[-len(slots) :]
    if _rendered(of_another_day, "", *texts) != _rendered(render, "", *texts):
        raise ModelError(
            f"The chat template of the tokenizer beside {file} writes today's date (strftime_now), so that "
            f"sentence-transformers gives other {_answers(slots)} each day, and a bundle keeps the date of its build.",
            hint="Write a date into the template, or remove strftime_now from it.",
        )


def _render_of(
    tokenizer: Any, slots: Sequence[Slot], file: Path, message_format: MessageFormat, options: Mapping[str, Any]
) -> _Render:
    """Return the function that writes a prompt and the texts of slots in a tokenizer's chat template."""
    wrong = [name for name in options if name in _NOT_RENDERED]
    if wrong:
        raise ModelError(
            f"{file} has processing_kwargs.chat_template.{wrong[0]} {shown(options[wrong[0]])}, which a bundle cannot "
            f"honour.",
            hint=f"Remove it if the model gives the same {_answers(slots)} without it.",
        )
    if tokenizer.truncation_side != "right":
        raise ModelError(
            f"The tokenizer beside {file} has truncation_side {shown(tokenizer.truncation_side)}; "
            f"{'pairs' if slots == _OF_PAIRS else 'texts'} in a chat template are truncated at the end.",
            hint="Set it to right in tokenizer_config.json, if they always fit.",
        )

    def render(prompt: str, *texts: str) -> str:
        text_of_slot: dict[Slot, str] = {"prompt": prompt, **dict(zip(slots, texts, strict=True))}
        messages = [
            {
                "role": _ROLES.get(slot, slot),
                "content": text if message_format == "flat" else [{"type": "text", "text": text}],
            }
            for slot, text in text_of_slot.items()
            if text or slot != "prompt"
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    return render


def _answers(slots: Sequence[Slot]) -> str:
    return "scores" if slots == _OF_PAIRS else "embeddings"


def _plain(render: _Render, slots: tuple[Slot, ...], file: Path) -> Wording:
    """The text without a prompt."""
    try:
        return _wording(render("", *(_SENTINELS[slot] for slot in slots)), slots)
    except Exception as error:
        # A template may raise any error.
        if isinstance(error, (MemoryError, ModelError)):
            raise
        what, hint = ("pair", _HINT_FOR_PAIRS) if slots == _OF_PAIRS else ("text", _HINT_FOR_TEXTS)
        raise ModelError(
            f"The chat template of the tokenizer beside {file} cannot write a {what}: {shown(error)}", hint=hint
        ) from error


def _prompted(render: _Render, slots: tuple[Slot, ...]) -> Wording | None:
    """The text with a prompt; None where the template raises for one, as many do for the role ``system``."""
    try:
        rendered = render(*(_SENTINELS[slot] for slot in ("prompt", *slots)))
    except MemoryError:
        raise
    except Exception:
        return None
    return _wording(rendered, slots, has_prompt=True)


def _wording(rendered: str, needed: tuple[Slot, ...], *, has_prompt: bool = False) -> Wording:
    counts = {slot: rendered.count(_SENTINELS[slot]) for slot in (*needed, "prompt")}
    # A prompt may be left out, which then changes nothing.
    if not has_prompt:
        counts["prompt"] = 0
    wrong = next((slot for slot, count in counts.items() if count > 1 or (count == 0 and slot != "prompt")), None)
    if wrong is not None:
        of_pair, hint = (" of a pair", _HINT_FOR_PAIRS) if needed == _OF_PAIRS else ("", _HINT_FOR_TEXTS)
        raise ModelError(
            f"The checkpoint's chat template writes the {wrong}{of_pair} {counts[wrong]} times; it must be there "
            f"once, as it is.",
            hint=hint,
        )
    slots = sorted((slot for slot, count in counts.items() if count), key=lambda slot: rendered.index(_SENTINELS[slot]))
    parts = []
    for slot in slots:
        before, _, rendered = rendered.partition(_SENTINELS[slot])
        parts.append(TemplatePart(before=before, slot=slot))
    return Wording(parts=tuple(parts), after=rendered)


def _check_all(
    render: _Render,
    template: PairTemplate | TextTemplate,
    prompts: Iterable[str],
    examples: Sequence[tuple[str, ...]],
) -> None:
    """Rejects a template that treats some of the example texts or pairs differently from others."""
    used = ["", *({*_TEXTS, *prompts} - {""} if template.prompted is not None else ())]
    for prompt in used:
        for texts in examples:
            rendered = _rendered(render, prompt, *texts)
            if rendered != template.write(*texts, prompt=prompt).text:
                raise _uneven(template, rendered, prompt, *texts)


def _rendered(render: _Render, prompt: str, *texts: str) -> str:
    try:
        return render(prompt, *texts)
    except MemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _uneven(template: PairTemplate | TextTemplate, rendered: str, prompt: str, *texts: str) -> ModelError:
    slots, hint = (("text",), _HINT_FOR_TEXTS) if isinstance(template, TextTemplate) else (_OF_PAIRS, _HINT_FOR_PAIRS)
    named = ", ".join(f"the {slot} {shown(text)}" for slot, text in zip(slots, texts, strict=True))
    return ModelError(
        "The checkpoint's chat template does not write all texts in the same way, and a bundle has only the text "
        f"around them: {named}, the prompt {shown(prompt)} are written as {shown(rendered)}.",
        hint=hint,
    )
