"""Inputs of a bundle's graphs, from a caller's arrays or from encoded texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hdruntime.arrays import AnyArray, FloatArray, IntArray
from hdruntime.bundle.graph_interface import state_at_start
from hdruntime.bundle.manifest import Fill, InputSpec, Manifest, Role
from hdruntime.errors import InputError, Setting
from hdruntime.text.checks import length_error
from hdruntime.text.encoding import Encoding

_INT64_MAX = np.iinfo(np.int64).max

BUILD_WITH_MEMORY = (
    "XLNet and Transformer-XL have recurrent states, and so has BERT with sliding windows and a memory cache: "
    "hdexport build MODEL --attention window:256,right:0,global:0 --recurrence 512"
)
"""Hint for bundles without recurrent states."""

_MEANINGS = {
    Role.MASK: "1 for real tokens and 0 for padding",
    Role.GLOBAL_ATTENTION_MASK: "1 for global tokens and 0 for all others",
    Role.POOLED: "1 for tokens that are pooled and 0 for a prompt's",
    Role.ATTENDED: "1 for tokens that other tokens attend to and 0 for tokens that only attend",
}
"""Role -> the meaning of its two values."""


def checked_inputs(
    inputs: Mapping[str, object], manifest: Manifest, *, max_len: int | None = None, memory: int | None = None
) -> dict[str, AnyArray]:
    """The inputs of the bundle's graphs, checked, with defaults for missing inputs.

    Args:
        inputs: name -> array, tensor or nested list: integers [batch, tokens]; masks also as booleans, and the
            attention mask also as floats 0 and 1; recurrent states as floats of the manifest's shape. None is a missing
            input.
        max_len: maximum tokens, if the backend's differs from the manifest's.
        memory: size of the axis ``memory`` if no recurrent state has that axis; None for the maximum.

    Returns:
        name -> int64 [batch, tokens], or float32 of the manifest's shape for a recurrent state, in manifest order.
    """
    accepted = [spec.name for spec in manifest.inputs]
    for name in inputs:
        if name not in accepted:
            raise _unknown_input(name, manifest)
    for spec in manifest.inputs:
        if spec.default.fill is Fill.REQUIRED and inputs.get(spec.name) is None:
            raise InputError(f"{spec.name} is missing; give it as integers of shape [batch, tokens].")
    ids = _integers(inputs[manifest.ids], manifest.ids)
    tokens, max_tokens = ids.shape[1], max_len or manifest.max_len
    if not 1 <= tokens <= max_tokens:
        raise length_error("Input", tokens, max_tokens, "Truncate it")
    read: dict[str, AnyArray] = {manifest.ids: ids}
    for spec in manifest.inputs:
        value = inputs.get(spec.name)
        if value is not None and spec.name != manifest.ids:
            read[spec.name] = _read(value, spec)
            _check_shape(spec, read[spec.name], ids, manifest.ids)
    memory = _size_of_memory(read, manifest, manifest.max_memory if memory is None else memory)
    return _filled_inputs(read, manifest, memory=memory)


def inputs_of_texts(encodings: Sequence[Encoding], manifest: Manifest, *, memory: int) -> dict[str, AnyArray]:
    """The inputs of a batch of texts, padded on the right; recurrent states have their defaults.

    Args:
        encodings: one or more, each with 1 to the bundle's maximum of tokens.
        manifest: manifest of the bundle.
        memory: size of the axis ``memory``.

    Returns:
        as `checked_inputs`.
    """
    pad_id = manifest.tokenizer.pad_token_id if manifest.tokenizer else 0
    lengths = np.array([[len(encoding)] for encoding in encodings])
    positions = np.arange(lengths.max())
    is_token = positions < lengths
    inputs: dict[str, AnyArray] = {}
    for spec in manifest.inputs:
        if spec.role is Role.MASK:
            inputs[spec.name] = is_token.astype(np.int64)
        elif spec.role is Role.POOLED:
            prompts = np.array([[encoding.prompt_tokens] for encoding in encodings])
            inputs[spec.name] = (is_token & (positions >= prompts)).astype(np.int64)
        elif spec.role is Role.ATTENDED:
            unattended = np.array([[encoding.unattended_tokens] for encoding in encodings])
            inputs[spec.name] = (positions < lengths - unattended).astype(np.int64)
        elif spec.role is Role.IDS or (spec.role is Role.TOKEN_TYPES and _reads_types_of_texts(manifest)):
            inputs[spec.name] = np.full(is_token.shape, pad_id if spec.role is Role.IDS else 0, np.int64)
            inputs[spec.name][is_token] = _joined(encodings, spec.role, manifest)
    return _filled_inputs(inputs, manifest, memory=memory)


def surely_fit(encodings: Sequence[Encoding], manifest: Manifest) -> bool:
    """Whether a quick check shows that :func:`check_text` accepts all of these texts."""
    global_mask = manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
    if global_mask is not None and global_mask.default.fill is Fill.UNTIL_TOKEN:
        return False
    for role in (Role.IDS, Role.TOKEN_TYPES) if _reads_types_of_texts(manifest) else (Role.IDS,):
        spec = manifest.input_of(role)
        number = None if spec is None else manifest.number_of_values(spec)
        # Negative values are huge as unsigned numbers.
        if number and _joined(encodings, role, manifest).view(np.uint64).max(initial=0) >= number:
            return False
    return True


def check_text(encoding: Encoding, manifest: Manifest) -> None:
    """Reject a text that would fail a whole batch: an id or a token type is out of range, or a question that must be
    global has no end or too many tokens."""
    values = {Role.IDS: encoding.input_ids}
    if _reads_types_of_texts(manifest):
        values[Role.TOKEN_TYPES] = encoding.token_type_ids
    for spec in manifest.inputs:
        numbers, end = values.get(spec.role), manifest.number_of_values(spec)
        # As lists: arrays of so few tokens cost more. No tokenizer gives a negative type.
        if numbers and end and (max(numbers) >= end or (spec.role is Role.IDS and min(numbers) < 0)):
            _check_values(spec, _integers([numbers], spec.name), manifest)
    check_global_questions([encoding], manifest)


def check_global_questions(texts: Sequence[Encoding], manifest: Manifest) -> None:
    """Reject texts without a default global_attention_mask: the question has no end, or too many tokens."""
    spec = manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
    if spec is None or spec.default.fill is not Fill.UNTIL_TOKEN:
        return
    for index, text in enumerate(texts):
        place = "the text" if len(texts) == 1 else f"text {index}"
        separator_id, ids = spec.default.token_id, text.input_ids
        _check_question(place, ids.index(separator_id) if separator_id in ids else None, spec)


def _reads_types_of_texts(manifest: Manifest) -> bool:
    return manifest.tokenizer is None or manifest.tokenizer.token_types


def _filled_inputs(inputs: Mapping[str, AnyArray], manifest: Manifest, *, memory: int) -> dict[str, AnyArray]:
    """Inputs of the graphs, of the manifest's dtypes and shapes, with defaults for missing inputs."""
    for spec in manifest.inputs:
        if spec.name in inputs and spec.role is not Role.RECURRENT_STATE:
            _check_values(spec, inputs[spec.name], manifest)
    ids = inputs[manifest.ids]
    mask = inputs[manifest.mask] if manifest.mask in inputs else np.ones_like(ids)
    filled: dict[str, AnyArray] = {}
    for spec in manifest.inputs:
        value = mask if spec.name == manifest.mask else inputs.get(spec.name)
        filled[spec.name] = _default(spec, ids, mask, memory) if value is None else value
        if spec.role is Role.GLOBAL_ATTENTION_MASK:
            _check_global_mask(spec, filled[spec.name], mask)
        elif spec.role is Role.RECURRENT_STATE and not spec.has_memory_axis and spec.bound is not None:
            _check_document_tokens(spec.name, filled[spec.name], mask, spec.bound)
    return filled


def _joined(encodings: Sequence[Encoding], role: Role, manifest: Manifest) -> IntArray:
    """The concatenated ids, or token types, of all texts."""
    try:
        return np.concatenate([encoding.ids if role is Role.IDS else encoding.types for encoding in encodings])
    except OverflowError:
        # An integer that no array holds; encodings of callers have any.
        for encoding in encodings:
            check_text(encoding, manifest)
        raise


def _unknown_input(name: str, manifest: Manifest) -> InputError:
    accepted = ", ".join(spec.name for spec in manifest.inputs)
    is_state = name.startswith("mem") and not manifest.recurrent_states
    return InputError(
        f"Unknown input {name!r}; this bundle accepts {accepted}.",
        hint=f"This bundle has no recurrent states. {BUILD_WITH_MEMORY}" if is_state else "",
    )


def _size_of_memory(inputs: Mapping[str, AnyArray], manifest: Manifest, default: int) -> int:
    """The size of the axis ``memory`` of all recurrent states in the inputs; the default without one."""
    sizes = {
        spec.name: inputs[spec.name].shape[1]
        for spec in manifest.recurrent_states
        if spec.has_memory_axis and spec.name in inputs
    }
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise InputError(
            f"The recurrent states have memory caches of different sizes: {shown}.",
            hint="Pass the states of one call, or leave all of them out.",
        )
    return next(iter(sizes.values()), default)


def _default(spec: InputSpec, ids: IntArray, mask: IntArray, memory: int) -> AnyArray:
    if spec.role is Role.RECURRENT_STATE:
        return state_at_start(spec, rows=len(ids), memory=memory)
    if spec.default.fill in (Fill.FIRST_TOKEN, Fill.UNTIL_TOKEN):
        return _default_global_mask(spec, ids, mask)
    if spec.default.fill is Fill.AFTER_TOKEN:
        # In a row without such a token the ones begin at token 1, as in Hugging Face's BigBird.
        first = (ids == spec.default.token_id).argmax(axis=1)
        return (np.arange(ids.shape[1]) > first[:, None]).astype(np.int64)
    return np.full_like(ids, int(spec.default.fill is Fill.ONES))


def _read(value: object, spec: InputSpec) -> AnyArray:
    if spec.role is Role.RECURRENT_STATE:
        return _floats(value, spec)
    is_mask = spec.role is Role.MASK
    return _integers(
        value,
        spec.name,
        may_be_boolean=is_mask or spec.role in (Role.GLOBAL_ATTENTION_MASK, Role.POOLED, Role.ATTENDED),
        may_be_float=is_mask,
    )


def _floats(value: object, spec: InputSpec) -> FloatArray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{spec.name} cannot be read: {error}; give an array {_shown(spec)}.") from error
    if array.dtype.kind != "f":
        raise InputError(f"{spec.name} is of type {array.dtype}; it must be float32.")
    if array.ndim != len(spec.shape):
        raise InputError(f"{spec.name} has shape {list(array.shape)}; it must be {_shown(spec)}.")
    if not np.isfinite(array).all():
        raise InputError(f"{spec.name} holds NaN or infinity; give the previous call's output, or leave it out.")
    return np.ascontiguousarray(array, dtype=np.float32)


def _shown(spec: InputSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


def _integers(value: object, name: str, *, may_be_boolean: bool = False, may_be_float: bool = False) -> IntArray:
    """The value as an int64 array [batch, tokens], or an error with the reason; floats may be 0 and 1 only."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        # Ragged lists, and tensors outside the CPU's memory.
        raise InputError(
            f"{name} cannot be read as an array [batch, tokens]: {error}.",
            hint="Pad shorter rows and mark the padding with 0 in attention_mask.",
        ) from error
    if array.ndim != 2:
        raise InputError(
            f"{name} has shape {list(array.shape)}; it must be [batch, tokens].",
            hint="Put a single document into a list: [ids].",
        )
    if array.shape[0] == 0:
        raise InputError(f"{name} has shape {list(array.shape)}: the batch is empty; give at least one row.")
    if array.size and array.dtype == object:
        # NumPy's type for integers beyond 64 bits; no other list of numbers becomes this type.
        raise InputError(f"{name} holds values that are not integers of at most 64 bits; give an array of int64.")
    if may_be_float and array.dtype.kind == "f" and np.isin(array, (0, 1)).all():
        # As XLNet's mask is in Hugging Face.
        array = array.astype(np.int64)
    if array.size and array.dtype.kind not in ("iub" if may_be_boolean else "iu"):
        raise InputError(f"{name} is of type {array.dtype}; it must be integers, for example int64.")
    if array.size and array.dtype == np.uint64 and int(array.max()) > _INT64_MAX:
        largest = int(array.max())
        raise InputError(f"{name} holds {largest}, which is more than int64 can hold; give at most {_INT64_MAX}.")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_shape(spec: InputSpec, array: AnyArray, ids: IntArray, ids_name: str) -> None:
    if spec.role is not Role.RECURRENT_STATE and array.shape != ids.shape:
        raise InputError(
            f"{spec.name} has shape {list(array.shape)}, but {ids_name} {list(ids.shape)}; they must be equal."
        )
    if spec.role is not Role.RECURRENT_STATE:
        return
    start = 2 if spec.has_memory_axis else 1
    fits = len(array) == len(ids) and array.shape[start:] == spec.shape[start:]
    if fits and (start == 1 or 1 <= array.shape[1] <= (spec.bound or 0)):
        return
    sizes = f", memory being 1 to {spec.bound}" if spec.has_memory_axis else ""
    raise InputError(
        f"{spec.name} has shape {list(array.shape)}; for {len(ids)} rows it must be {_shown(spec)}{sizes}: the "
        "previous call's output for the same rows."
    )


def _check_document_tokens(name: str, before: AnyArray, mask: IntArray, max_tokens: int) -> None:
    """Reject documents of more than `max_tokens` tokens.

    The recurrent state `name`, float32 [batch, 1], counts the tokens `before` this call, and `mask`, [batch, tokens],
    the tokens of this call.
    """
    documents = before[:, 0] + mask.sum(axis=1)
    if documents.max() > max_tokens or before.min() < 0:
        row = int(documents.argmax() if documents.max() > max_tokens else before[:, 0].argmin())
        raise InputError(
            f"Row {row} has {int(mask[row].sum())} tokens after {before[row, 0]:g} of earlier calls ({name}); a "
            f"document of this bundle has at most {max_tokens}.",
            hint=(
                "Leave out the recurrent states to begin a new document, or build the bundle again with a larger ",
                Setting("max_len", command="build"),
                ".",
            ),
        )


def _check_values(spec: InputSpec, values: IntArray, manifest: Manifest) -> None:
    """Reject values out of range: some backends fail with them, and others take the nearest value."""
    number = manifest.number_of_values(spec)
    largest = _INT64_MAX if number is None else number - 1
    # Negative values are huge as unsigned numbers, so one comparison finds both errors.
    if values.view(np.uint64).max() <= largest:
        return
    row, token = map(int, np.argwhere((values < 0) | (values > largest))[0])
    accepted, hint = _accepted(spec, number)
    raise InputError(f"{spec.name}[{row}, {token}] is {values[row, token]}; {accepted}.", hint=hint)


def _accepted(spec: InputSpec, number: int | None) -> tuple[str, str]:
    """The accepted values of an input, and a hint."""
    if number is None:
        return "it must be 0 or more", ""
    if spec.role is Role.IDS:
        return (
            f"the vocabulary has {number} ids, 0 to {number - 1}",
            "Use the bundle's tokenizer, tokenizer.json.",
        )
    if spec.role is Role.TOKEN_TYPES:
        accepted = f"the model has {number} token types, 0 to {number - 1}"
        return accepted, f"Leave out {spec.name} for single texts; session.tokenize makes the token types of pairs."
    return f"it must be {_MEANINGS[spec.role]}", ""


def _default_global_mask(spec: InputSpec, ids: IntArray, mask: IntArray) -> IntArray:
    """The default global_attention_mask: the first real token of every row, or the question before the first separator.

    A row of padding has no global token. `ids`, `mask` (1 for real tokens) and the result (1 for global tokens) are
    int64 [batch, tokens].
    """
    if spec.default.fill is Fill.FIRST_TOKEN:
        first = (mask.cumsum(axis=1) == 1) & (mask == 1)
        return first.astype(np.int64)
    separators = (ids == spec.default.token_id) & (mask == 1)
    is_global = (separators.cumsum(axis=1) == 0) & (mask == 1)
    for row, (count, has_separator) in enumerate(zip(is_global.sum(axis=1), separators.any(axis=1), strict=True)):
        if count:
            _check_question(f"row {row}", int(count) if has_separator else None, spec)
    return is_global.astype(np.int64)


def _check_global_mask(spec: InputSpec, global_mask: IntArray, mask: IntArray) -> None:
    """Reject rows with more global tokens than the bundle accepts; both masks are int64 [batch, tokens], 0 or 1."""
    if spec.bound is None:
        return
    counts = (global_mask * mask).sum(axis=1)
    if (counts > spec.bound).any():
        row = int(np.argmax(counts > spec.bound))
        raise InputError(
            f"{spec.name} has {counts[row]} global tokens in row {row}; this bundle accepts {spec.bound}.",
            hint=("Reduce them, or build the bundle again with ", _max_global(int(counts[row])), "."),
        )


def _check_question(place: str, tokens: int | None, spec: InputSpec) -> None:
    if tokens is None:
        raise InputError(
            f"The end of the question of {place} is unknown: there is no separator (id {spec.default.token_id}).",
            hint=f"Encode question and context as a pair, or pass {spec.name}.",
        )
    if spec.bound is not None and tokens > spec.bound:
        raise InputError(
            f"The question of {place} has {tokens} tokens, which are all global; this bundle accepts {spec.bound}.",
            hint=(f"Shorten it, pass {spec.name}, or build the bundle again with ", _max_global(tokens), "."),
        )


def _max_global(tokens: int) -> Setting:
    return Setting("max_global", tokens, command="build")
