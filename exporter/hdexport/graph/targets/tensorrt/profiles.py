"""Optimisation profiles, the batches and lengths that an engine is tuned for, from options or by default."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from hdexport.families import family_of
from hdruntime.bundle.manifest import Manifest, ProfileShape
from hdruntime.errors import InputError, Setting

logger = logging.getLogger(__name__)

DEFAULT_BATCH = (1, 1, 8)
"""Batch sizes (min, opt, max): tuned for single requests; a batch job packs up to eight."""

_SHORT_LENGTHS = (128, 512)
"""Tokens of the first default buckets; after the last of them, lengths double."""

_MOST_TOKENS = 2**31 - 1
"""Elements in one TensorRT tensor; activations have several per token and reach it sooner, which TensorRT reports."""

_INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")
"""Graph inputs whose shapes options may give; all are [batch, tokens]. Sizes of recurrent states are the bundle's."""

_SHAPE_OPTIONS = (Setting("min_shapes"), ", ", Setting("opt_shapes"), " and ", Setting("max_shapes"))

_Shape = tuple[int, int]


def default_lengths(max_len: int) -> tuple[int, ...]:
    """Token buckets 128, 512, 1024, 2048, ... below ``max_len``, and ``max_len`` itself."""
    lengths = list(_SHORT_LENGTHS)
    while lengths[-1] * 2 < max_len:
        lengths.append(lengths[-1] * 2)
    return (*(length for length in lengths if length < max_len), max_len)


def default_profiles(manifest: Manifest) -> tuple[ProfileShape, ...]:
    """A profile for each bucket of :func:`default_lengths`; one for all lengths of a model whose layers are one
    layer."""
    return profiles_from_options(manifest.max_len, one_profile=family_of(manifest.model_type).shares_layers)


def profiles_from_options(
    max_len: int,
    *,
    profiles: str | None = None,
    batch: str | None = None,
    min_shapes: Sequence[str] = (),
    opt_shapes: Sequence[str] = (),
    max_shapes: Sequence[str] = (),
    one_profile: bool = False,
) -> tuple[ProfileShape, ...]:
    """The profiles that the options describe, the shortest first; by default one for each bucket of `default_lengths`.

    A profile of a bucket is tuned for the bucket's longest input and takes every shorter one, down to one token.

    Args:
        max_len: longest input of the bundle, in tokens.
        profiles: longest input of each profile, as ``128,512,4096``.
        batch: batch sizes, as ``MIN:OPT:MAX``; a single ``N`` is ``1:N:N``.
        min_shapes: smallest shapes as trtexec takes them, ``input_ids:1x1,attention_mask:1x1``; one item for each
            profile.
        opt_shapes: the shapes that TensorRT tunes each profile for.
        max_shapes: the largest shapes of each profile.
        one_profile: without options, one profile for all lengths instead of one for each bucket.
    """
    shapes = {"min_shapes": min_shapes, "opt_shapes": opt_shapes, "max_shapes": max_shapes}
    if not any(shapes.values()):
        if profiles is None and one_profile:
            profiles = str(max_len)
        return _checked_volumes(_profiles_of_buckets(max_len, profiles, batch))
    if profiles is not None or batch is not None:
        raise InputError(
            *_SHAPE_OPTIONS,
            " were given together with ",
            Setting("profiles"),
            " or ",
            Setting("batch"),
            ".",
            hint="Describe the profiles in one of the two ways.",
        )
    return _checked_volumes(_profiles_of_shapes(max_len, shapes))


def with_memory(profiles: Sequence[ProfileShape], *, most: int) -> tuple[ProfileShape, ...]:
    """The profiles for recurrent states of any size up to `most` tokens, tuned for the largest, with which streams run.
    0 is for a bundle whose states, if any, have fixed sizes."""
    memory = (1, most, most) if most else None
    return tuple(dataclasses.replace(profile, memory=memory) for profile in profiles)


def _checked_volumes(profiles: tuple[ProfileShape, ...]) -> tuple[ProfileShape, ...]:
    for profile in profiles:
        tokens = profile.batch[2] * profile.tokens[2]
        if tokens > _MOST_TOKENS:
            raise InputError(
                f"A batch of {profile.batch[2]} x {profile.tokens[2]} tokens has {tokens} elements, and a tensor of "
                f"TensorRT holds at most {_MOST_TOKENS}.",
                hint=("Give a smaller batch, for example ", Setting("batch", "1:1:8"), "."),
            )
    return profiles


def _profiles_of_buckets(max_len: int, profiles: str | None, batch: str | None) -> tuple[ProfileShape, ...]:
    batches = DEFAULT_BATCH if batch is None else _batch(batch)
    lengths = default_lengths(max_len) if profiles is None else _lengths(profiles, max_len)
    return tuple(ProfileShape(batch=batches, tokens=(1, length, length)) for length in lengths)


def _lengths(text: str, max_len: int) -> list[int]:
    lengths = [_number(item, option="profiles", example="128,512,4096") for item in text.split(",")]
    for length in lengths:
        _check_length(length, max_len, option="profiles")
    if len(set(lengths)) != len(lengths):
        raise InputError(Setting("profiles", text), " has a length twice.", hint="Give each length once.")
    if max(lengths) < max_len:
        logger.warning("the engine serves up to %d of the bundle's %d tokens", max(lengths), max_len)
    return sorted(lengths)


def _batch(text: str) -> tuple[int, int, int]:
    numbers = [_number(item, option="batch", example="1:1:8") for item in text.split(":")]
    if len(numbers) == 1:
        return 1, numbers[0], numbers[0]
    if len(numbers) != 3 or numbers != sorted(numbers):
        raise InputError(
            Setting("batch", text),
            " is not MIN:OPT:MAX with MIN <= OPT <= MAX.",
            hint=("Give for example ", Setting("batch", "1:1:8"), "."),
        )
    return numbers[0], numbers[1], numbers[2]


def _profiles_of_shapes(max_len: int, shapes: dict[str, Sequence[str]]) -> tuple[ProfileShape, ...]:
    counts = {len(texts) for texts in shapes.values()}
    if len(counts) != 1:
        counted = ", ".join(f"{len(texts)} {option.replace('_', ' ')}" for option, texts in shapes.items())
        raise InputError(
            f"A profile needs its min, opt and max shape, and the options give {counted}.",
            hint=("Give ", *_SHAPE_OPTIONS, " once for each profile."),
        )
    profiles = []
    for texts in zip(*shapes.values(), strict=True):
        smallest, best, largest = (_shape(text, option=option) for text, option in zip(texts, shapes, strict=True))
        for axis, values in zip(("batch", "tokens"), zip(smallest, best, largest, strict=True), strict=True):
            if list(values) != sorted(values):
                raise InputError(
                    f"The {axis} sizes {values[0]}, {values[1]} and {values[2]} of ",
                    *_SHAPE_OPTIONS,
                    " are not in ascending order.",
                    hint="Give min <= opt <= max.",
                )
        _check_length(largest[1], max_len, option="max_shapes")
        profiles.append(
            ProfileShape(
                batch=(smallest[0], best[0], largest[0]),
                tokens=(smallest[1], best[1], largest[1]),
            )
        )
    return tuple(sorted(profiles, key=lambda profile: profile.tokens[2]))


def _shape(text: str, *, option: str) -> _Shape:
    """The one shape [batch, tokens] that all inputs named in ``text`` are given."""
    shapes: dict[str, _Shape] = {}
    for item in text.split(","):
        name, colon, sizes = item.partition(":")
        if name not in _INPUT_NAMES or not colon:
            raise InputError(
                Setting(option),
                f" names the input {name!r}; inputs are {', '.join(_INPUT_NAMES)}. Recurrent states have the sizes of "
                "the bundle.",
                hint=("Give for example ", Setting(option, "input_ids:1x128,attention_mask:1x128"), "."),
            )
        numbers = [_number(size, option=option, example="input_ids:1x128") for size in sizes.split("x")]
        if len(numbers) != 2:
            raise InputError(
                Setting(option),
                f" gives {name} the shape {sizes!r}, but {name} has two axes, batch and tokens.",
                hint=("Give for example ", Setting(option, f"{name}:1x128"), "."),
            )
        shapes[name] = (numbers[0], numbers[1])
    if len(set(shapes.values())) != 1:
        raise InputError(
            Setting(option, text),
            " gives the inputs different shapes, but all of them are [batch, tokens].",
            hint="Give all inputs the same shape.",
        )
    return next(iter(shapes.values()))


def _number(text: str, *, option: str, example: str) -> int:
    # str.isdecimal() alone would take digits of other scripts, and int() alone would take "1_000" and " 5".
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise InputError(
            Setting(option),
            f" holds {text!r}, which is not a whole number above 0.",
            hint=("Give for example ", Setting(option, example), "."),
        )
    return int(text)


def _check_length(length: int, max_len: int, *, option: str) -> None:
    if length > max_len:
        raise InputError(
            Setting(option),
            f" asks for {length} tokens, but the model is built for {max_len}.",
            hint=(f"Take at most {max_len}, or build with ", Setting("max_len", length, command="build"), "."),
        )
