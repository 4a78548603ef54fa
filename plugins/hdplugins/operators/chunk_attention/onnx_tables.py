"""Which tokens are real, and which chunks a chunk sees, as ONNX text that needs the token mask alone."""

from __future__ import annotations

__all__ = ["tables"]


def tables(*, chunk: int, before: int, after: int, multiple: int, rounds: int = 1, by_row: bool = False) -> str:
    """Text that makes `seen_chunks`, [batch or 1, chunks of all rounds, before + 1 + after], and `padded_bias`.

    `padded_bias` is [batch, padded], 0 for real keys and far below for padding. A text has `padded` tokens, and
    `chunks` chunks in each round.

    Args:
        chunk: tokens of a chunk.
        before: chunks before a query's own that it sees.
        after: likewise after it.
        multiple: of how many tokens a padded text is.
        rounds: each of as many chunks; those of all rounds form one circle.
        by_row: the circle has the chunks of each text's own real tokens; else that of all texts has those of the batch.
    """
    text = _REAL.format(multiple=multiple, chunk=chunk, rounds=rounds)
    text += _ENDS_BY_ROW.format(more=multiple - 1, multiple=multiple, chunks=multiple // chunk) if by_row else _ENDS
    steps = list(range(-before, after + 1))
    return text + _SEEN_CHUNKS.format(round_numbers=list(range(rounds)), steps=steps, seen=len(steps))


_REAL = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    two_1d = Constant <value_ints = [2]> ()
    last_axis = Constant <value_ints = [-1]> ()
    both_axes = Constant <value_ints = [1, 2]> ()
    any_number = Constant <value_ints = [-1]> ()
    chunk = Constant <value_int = {chunk}> ()
    chunk_1d = Unsqueeze (chunk, zero_1d)
    multiple = Constant <value_int = {multiple}> ()
    rounds = Constant <value_int = {rounds}> ()
    rounds_1d = Unsqueeze (rounds, zero_1d)
    seen_score = Constant <value_float = 0.0> ()
    masked_score = Constant <value_float = -1.0e30> ()
    scale = Constant <value_float: float = @scale> ()
    mask_shape = Shape (token_mask)
    batch_1d = Shape <end = 1> (token_mask)
    tokens = Gather (mask_shape, one)
    tokens_1d = Unsqueeze (tokens, zero_1d)
    last_token = Sub (tokens, one)
    last_multiple = Div (last_token, multiple)
    multiples = Add (last_multiple, one)
    padded = Mul (multiples, multiple)
    padded_1d = Unsqueeze (padded, zero_1d)
    missing = Sub (padded, tokens)
    missing_1d = Unsqueeze (missing, zero_1d)
    chunks = Div (padded, chunk)
    chunks_1d = Unsqueeze (chunks, zero_1d)
    all_chunks = Mul (chunks, rounds)
    all_chunks_1d = Unsqueeze (all_chunks, zero_1d)
    places = Range (zero, padded, one)
    real = Cast <to = 9> (token_mask)
    token_bias = Where (real, seen_score, masked_score)
    nothing_before = Constant <value_ints = [0, 0, 0]> ()
    token_padding = Concat <axis = 0> (nothing_before, missing_1d)
    padded_bias = Pad (token_bias, token_padding, masked_score)
"""

# `own_chunks`: how many chunks of a round are in the circle of each text, or of all.
_ENDS = """
    own_chunks = Identity (chunks_1d)
"""

_ENDS_BY_ROW = """
    real_numbers = Cast <to = 7> (real)
    real_tokens = ReduceSum <keepdims = 0> (real_numbers, one_1d)
    ends = Max (real_tokens, one)
    more = Constant <value_int = {more}> ()
    rounded_ends = Add (ends, more)
    own_multiples = Div (rounded_ends, multiple)
    chunks_of_multiple = Constant <value_int = {chunks}> ()
    own_chunks = Mul (own_multiples, chunks_of_multiple)
"""

# A step of as many chunks as the circle has, or more, leads nowhere. Chunks behind the end of a text's own see some of
# its chunks: as their queries are padding, it does not matter which.
_SEEN_CHUNKS = """
    own_column = Unsqueeze (own_chunks, both_axes)
    own_rows = Unsqueeze (own_column, last_axis)
    circle = Mul (own_rows, rounds)
    steps = Constant <value_ints = {steps}> ()
    step_lengths = Abs (steps)
    step_is_in_circle = Less (step_lengths, circle)
    steps_in_circle = Where (step_is_in_circle, steps, zero)
    round_numbers = Constant <value_ints = {round_numbers}> ()
    round_column = Unsqueeze (round_numbers, both_axes)
    round_starts = Mul (round_column, own_rows)
    chunk_numbers = Range (zero, chunks, one)
    chunk_column = Unsqueeze (chunk_numbers, one_1d)
    circle_numbers = Add (round_starts, chunk_column)
    stepped = Add (circle_numbers, steps_in_circle)
    above_zero = Add (stepped, circle)
    circle_turns = Div (above_zero, circle)
    turned = Mul (circle_turns, circle)
    seen_numbers = Sub (above_zero, turned)
    seen_rounds = Div (seen_numbers, own_rows)
    seen_round_starts = Mul (seen_rounds, own_rows)
    seen_of_round = Sub (seen_numbers, seen_round_starts)
    seen_round_offsets = Mul (seen_rounds, chunks)
    seen_by_round = Add (seen_round_offsets, seen_of_round)
    seen_shape = Constant <value_ints = [0, -1, {seen}]> ()
    seen_chunks = Reshape (seen_by_round, seen_shape)
"""
