"""The inputs of a bundle's graphs: those of a caller, checked, and those of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hdruntime.arrays import AnyArray, FloatArray, IntArray
from hdruntime.bundle.graph_interface import state_at_start
from hdruntime.bundle.manifest import Fill, InputSpec, Manifest, Role
from hdruntime.errors import InputError
from hdruntime.text.checks import length_error
from hdruntime.text.tokenization import Encoding

_INT64_MAX = np.iinfo(np.int64).max

BUILD_WITH_MEMORY = (
    "XLNet and Transformer-XL remember, and models like BERT that are built with windows and a memory: "
    "hdexport build MODEL --attention window:256,right:0,global:0 --recurrence 512"
)
"""Advice where a bundle that carries no states is given one."""

_MEANINGS = {
    Role.MASK: "1 for real tokens and 0 for padding",
    Role.GLOBAL_ATTENTION_MASK: "1 for global tokens and 0 for all others",
    Role.POOLED: "1 for tokens that are pooled and 0 for a prompt's",
    Role.ATTENDED: "1 for tokens that other tokens attend to and 0 for tokens that only attend",
}
"""Role -> the meaning of its two values."""


def checked_inputs(
    given: Mapping[str, object], manifest: Manifest, *, max_len: int | None = None, memory: int | None = None
) -> dict[str, AnyArray]:
    """The inputs of the bundle's graphs, with defaults filled in; the error of one that does not fit says what would.

    Args:
        given: name -> array, tensor or nested list: integers [batch, tokens], masks and marks also as booleans, and the
            mask as floats 0 and 1; for a state from the call before floats of the manifest's shape. A missing input, or
            None, gets the manifest's default.
        max_len: most tokens, if the backend accepts another number than the manifest says.
        memory: size of the axis ``memory`` if no state with that axis is given; None for the most.

    Returns:
        name -> int64 [batch, tokens], or, for a carried state, float32 of the manifest's shape; in the manifest's
        order.
    """
    accepted = [spec.name for spec in manifest.inputs]
    for name in given:
        if name not in accepted:
            raise _unknown_input(name, manifest)
    for spec in manifest.inputs:
        if spec.default.fill is Fill.REQUIRED and given.get(spec.name) is None:
            raise InputError(f"{spec.name} is missing; give it as integers of shape [batch, tokens].")
    ids = _integers(given[manifest.ids], manifest.ids)
    tokens, most = ids.shape[1], max_len or manifest.max_len
    if not 1 <= tokens <= most:
        raise length_error("Input", tokens, most, "Truncate it")
    read: dict[str, AnyArray] = {manifest.ids: ids}
    for spec in manifest.inputs:
        value = given.get(spec.name)
        if value is not None and spec.name != manifest.ids:
            read[spec.name] = _read(value, spec)
            _check_shape(spec, read[spec.name], ids, manifest.ids)
    memory = _size_of_memory(read, manifest, manifest.most_memory if memory is None else memory)
    return _filled_inputs(read, manifest, memory=memory)


def inputs_of_texts(encodings: Sequence[Encoding], manifest: Manifest, *, memory: int) -> dict[str, AnyArray]:
    """A batch of texts, shorter ones padded on the right, as :func:`checked_inputs` gives it: each has a token, and no
    more than the bundle takes. `memory` is the size of that axis; carried states hold their defaults."""
    pad_id = manifest.tokenizer.pad_token_id if manifest.tokenizer else 0
    lengths = np.array([[len(encoding)] for encoding in encodings])
    place = np.arange(lengths.max())
    is_token = place < lengths
    given: dict[str, AnyArray] = {}
    for spec in manifest.inputs:
        if spec.role is Role.MASK:
            given[spec.name] = is_token.astype(np.int64)
        elif spec.role is Role.POOLED:
            prompts = np.array([[encoding.prompt_tokens] for encoding in encodings])
            given[spec.name] = (is_token & (place >= prompts)).astype(np.int64)
        elif spec.role is Role.ATTENDED:
            unattended = np.array([[encoding.unattended_tokens] for encoding in encodings])
            given[spec.name] = (place < lengths - unattended).astype(np.int64)
        elif spec.role is Role.IDS or (spec.role is Role.TOKEN_TYPES and _reads_types_of_texts(manifest)):
            given[spec.name] = np.full(is_token.shape, pad_id if spec.role is Role.IDS else 0, np.int64)
            given[spec.name][is_token] = _joined(encodings, spec.role, manifest)
    return _filled_inputs(given, manifest, memory=memory)


def surely_fit(encodings: Sequence[Encoding], manifest: Manifest) -> bool:
    """Whether :func:`check_text` refuses none of these texts, by the quickest look; False where it may."""
    marks = manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
    if marks is not None and marks.default.fill is Fill.UNTIL_TOKEN:
        return False
    for role in (Role.IDS, Role.TOKEN_TYPES) if _reads_types_of_texts(manifest) else (Role.IDS,):
        spec = manifest.input_of(role)
        number = None if spec is None else manifest.number_of_values(spec)
        # Negative values are huge as unsigned numbers.
        if number and _joined(encodings, role, manifest).view(np.uint64).max(initial=0) >= number:
            return False
    return True


def check_text(encoding: Encoding, manifest: Manifest) -> None:
    """Refuse a text with which a whole batch would fail: an id or a token type is beyond the model's, or the question
    is not found where it is marked."""
    values = {Role.IDS: encoding.input_ids}
    if _reads_types_of_texts(manifest):
        values[Role.TOKEN_TYPES] = encoding.token_type_ids
    for spec in manifest.inputs:
        given, number = values.get(spec.role), manifest.number_of_values(spec)
        # As lists: arrays of so few tokens cost more. No tokenizer gives a negative type.
        if given and number and (max(given) >= number or (spec.role is Role.IDS and min(given) < 0)):
            _check_values(spec, _integers([given], spec.name), manifest)
    check_texts_for_marks([encoding], manifest)


def check_texts_for_marks(texts: Sequence[Encoding], manifest: Manifest) -> None:
    """Refuse texts without default marks: their question is not found, or is too long."""
    spec = manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
    if spec is None or spec.default.fill is not Fill.UNTIL_TOKEN:
        return
    for index, text in enumerate(texts):
        what = "the text" if len(texts) == 1 else f"text {index}"
        separator_id, ids = spec.default.token_id, text.input_ids
        _check_question(what, ids.index(separator_id) if separator_id in ids else None, spec)


def _reads_types_of_texts(manifest: Manifest) -> bool:
    return manifest.tokenizer is None or manifest.tokenizer.token_types


def _filled_inputs(given: Mapping[str, AnyArray], manifest: Manifest, *, memory: int) -> dict[str, AnyArray]:
    """The inputs of the bundle's graphs, from arrays that are as the manifest has them; ids alone are required."""
    for spec in manifest.inputs:
        if spec.name in given and spec.role is not Role.MEMORY:
            _check_values(spec, given[spec.name], manifest)
    ids = given[manifest.ids]
    mask = given[manifest.mask] if manifest.mask in given else np.ones_like(ids)
    filled: dict[str, AnyArray] = {}
    for spec in manifest.inputs:
        value = mask if spec.name == manifest.mask else given.get(spec.name)
        filled[spec.name] = _default(spec, ids, mask, memory) if value is None else value
        if spec.role is Role.GLOBAL_ATTENTION_MASK:
            _check_marks(spec, filled[spec.name], mask)
        elif spec.role is Role.MEMORY and not spec.has_memory_axis and spec.bound is not None:
            _check_document(spec.name, filled[spec.name], mask, spec.bound)
    return filled


def _joined(encodings: Sequence[Encoding], role: Role, manifest: Manifest) -> IntArray:
    """The ids of all texts, one after the other, or their token types."""
    try:
        return np.concatenate([encoding.ids if role is Role.IDS else encoding.types for encoding in encodings])
    except OverflowError:
        # An integer that no array holds; encodings of callers have any.
        for encoding in encodings:
            check_text(encoding, manifest)
        raise


def _unknown_input(name: str, manifest: Manifest) -> InputError:
    accepted = f"Unknown input {name!r}; this bundle accepts {', '.join(spec.name for spec in manifest.inputs)}."
    if name.startswith("mem") and not manifest.memories:
        accepted += f"\nIt remembers nothing from one call to the next. {BUILD_WITH_MEMORY}"
    return InputError(accepted)


def _size_of_memory(given: Mapping[str, AnyArray], manifest: Manifest, default: int) -> int:
    """The size of the axis ``memory`` that all given states agree on; the default if none has that axis."""
    sizes = {
        spec.name: given[spec.name].shape[1]
        for spec in manifest.memories
        if spec.has_memory_axis and spec.name in given
    }
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise InputError(
            f"The memories differ in their tokens: {shown}.",
            hint="Give all of them from one call, or leave all of them out.",
        )
    return next(iter(sizes.values()), default)


def _default(spec: InputSpec, ids: IntArray, mask: IntArray, memory: int) -> AnyArray:
    if spec.role is Role.MEMORY:
        return state_at_start(spec, rows=len(ids), memory=memory)
    if spec.default.fill in (Fill.FIRST_TOKEN, Fill.UNTIL_TOKEN):
        return _default_marks(spec, ids, mask)
    if spec.default.fill is Fill.AFTER_TOKEN:
        # In a row without such a token the ones begin at token 1, as in Hugging Face's BigBird.
        first = (ids == spec.default.token_id).argmax(axis=1)
        return (np.arange(ids.shape[1]) > first[:, None]).astype(np.int64)
    return np.full_like(ids, int(spec.default.fill is Fill.ONES))


def _read(value: object, spec: InputSpec) -> AnyArray:
    if spec.role is Role.MEMORY:
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
    if spec.role is not Role.MEMORY and array.shape != ids.shape:
        raise InputError(
            f"{spec.name} has shape {list(array.shape)}, but {ids_name} {list(ids.shape)}; they must be equal."
        )
    if spec.role is not Role.MEMORY:
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


def _check_document(name: str, before: AnyArray, mask: IntArray, most: int) -> None:
    """Refuse documents of more than `most` tokens: the input `name`, float32 [batch, 1], has those `before` this call,
    and the mask, [batch, tokens], those of this call."""
    documents = before[:, 0] + mask.sum(axis=1)
    if documents.max() > most or before.min() < 0:
        row = int(documents.argmax() if documents.max() > most else before[:, 0].argmin())
        raise InputError(
            f"Row {row} has {int(mask[row].sum())} tokens after {before[row, 0]:g} of earlier calls ({name}); a "
            f"document of this bundle has at most {most}.",
            hint="Begin a new document by leaving the memories out, or build again with a larger --max-len.",
        )


def _check_values(spec: InputSpec, values: IntArray, manifest: Manifest) -> None:
    """Refuse ids and marks without a meaning for the model: one backend would fail, and another take the nearest."""
    number = manifest.number_of_values(spec)
    most = _INT64_MAX if number is None else number - 1
    # Negative values are huge as unsigned numbers, so one comparison finds both errors.
    if values.view(np.uint64).max() <= most:
        return
    row, token = map(int, np.argwhere((values < 0) | (values > most))[0])
    raise InputError(f"{spec.name}[{row}, {token}] is {values[row, token]}; {_what_fits(spec, number)}")


def _what_fits(spec: InputSpec, number: int | None) -> str:
    if number is None:
        return "it must be 0 or more."
    if spec.role is Role.IDS:
        return (
            f"the vocabulary has {number} ids, 0 to {number - 1}.\n"
            "Tokenize with the bundle's own tokenizer.json (session.tokenize does)."
        )
    if spec.role is Role.TOKEN_TYPES:
        return (
            f"the model has {number} token types, 0 to {number - 1}.\n"
            f"Leave {spec.name} out for single texts; session.tokenize gives a pair's."
        )
    return f"it must be {_MEANINGS[spec.role]}."


def _default_marks(spec: InputSpec, ids: IntArray, mask: IntArray) -> IntArray:
    """Mark the first real token of every row, or the tokens before the first separator: the question.

    In a row of padding alone no token is marked. `ids`, `mask` (1 for real tokens) and the result (1 for marked tokens)
    are int64 [batch, tokens].
    """
    if spec.default.fill is Fill.FIRST_TOKEN:
        first = (mask.cumsum(axis=1) == 1) & (mask == 1)
        return first.astype(np.int64)
    separators = (ids == spec.default.token_id) & (mask == 1)
    marked = (separators.cumsum(axis=1) == 0) & (mask == 1)
    for row, (count, has_separator) in enumerate(zip(marked.sum(axis=1), separators.any(axis=1), strict=True)):
        if count:
            _check_question(f"row {row}", int(count) if has_separator else None, spec)
    return marked.astype(np.int64)


def _check_marks(spec: InputSpec, marks: IntArray, mask: IntArray) -> None:
    """Refuse rows with more marks than the bundle accepts; `marks` and `mask` are int64 [batch, tokens], 0 or 1."""
    if spec.bound is None:
        return
    marked = (marks * mask).sum(axis=1)
    if (marked > spec.bound).any():
        row = int(np.argmax(marked > spec.bound))
        raise InputError(
            f"{spec.name}: row {row} marks {marked[row]} tokens as global; this bundle accepts {spec.bound}.",
            hint=f"Mark fewer, or build the bundle again with --max-global {marked[row]}.",
        )


def _check_question(what: str, tokens: int | None, spec: InputSpec) -> None:
    if tokens is None:
        raise InputError(
            f"The end of the question of {what} is unknown: there is no separator (id {spec.default.token_id}).",
            hint=f"Encode question and context as a pair, or give {spec.name}.",
        )
    if spec.bound is not None and tokens > spec.bound:
        raise InputError(
            f"The question of {what} has {tokens} tokens, which are all global; this bundle accepts {spec.bound}.",
            hint=f"Shorten it, give {spec.name}, or build the bundle again with --max-global {tokens}.",
        )
