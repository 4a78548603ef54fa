"""Tables of blocks are those that Hugging Face draws in training, or a file's; files that do not fit are refused."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_block_mask
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from hdexport.attention.blocks import Mode
from hdexport.attention.blocks.conversion import BlockConversion
from hdexport.attention.blocks.random_tables import random_table, read_block_lists, read_table
from hdexport.families import family_of
from hdruntime.errors import InputError
from support.comparators import assert_close, named_case

HEADS, TOKENS, BLOCK_SIZE, LAYERS = 4, 120, 16, 2
BLOCKS = 8
SIZES = {"heads": HEADS, "max_tokens": TOKENS, "block_size": BLOCK_SIZE}


def big_bird_config(tokens: int, *, block_size: int = 64, random_blocks: int = 3) -> transformers.BigBirdConfig:
    return transformers.BigBirdConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=48,
        max_position_embeddings=tokens,
        initializer_range=0.15,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        block_size=block_size,
        num_random_blocks=random_blocks,
    )


@pytest.mark.parametrize(
    ("tokens", "block_size", "random_blocks"), [(1024, 64, 3), (3072, 16, 7), (4096, 128, 2), (4096, 64, 1)]
)
def test_a_seed_gives_the_blocks_that_hugging_face_draws(tokens: int, block_size: int, random_blocks: int) -> None:
    config = big_bird_config(tokens, block_size=block_size, random_blocks=random_blocks)
    for seed in (0, 11):
        attention = BigBirdBlockSparseAttention(config, seed).train()
        np.random.seed(seed)
        drawn = [
            attention._bigbird_block_rand_mask(tokens, tokens, block_size, block_size, random_blocks, last_idx=1024)
            for _ in range(HEADS)
        ]
        got = random_table(
            heads=HEADS, max_tokens=tokens, block_size=block_size, random_blocks=random_blocks, seed=seed
        )
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, np.stack(drawn))


def test_a_model_in_training_answers_as_ours_does_with_those_tables() -> None:
    torch.manual_seed(0)
    trained = transformers.BigBirdModel(big_bird_config(1024)).train()
    input_ids = torch.randint(3, 50, (1, 1024))
    mask = (torch.arange(1024) < 1000).long()[None]
    with torch.no_grad():
        expected = trained(input_ids=input_ids, attention_mask=mask).last_hidden_state[mask == 1].numpy()
    family = family_of("big_bird")
    assert family.native_attention is not None
    spec = family.native_attention.record(trained.config)
    own_seeds, one_seed = (
        np.stack([random_table(heads=HEADS, max_tokens=1024, block_size=64, random_blocks=3, seed=seed) for seed in of])
        for of in ((0, 1), (0, 0))
    )
    answers = []
    for mode, tables in ((Mode.TABLE, own_seeds), (Mode.TABLE, one_seed), (Mode.HF_EVAL, None)):
        ours = transformers.BigBirdModel(trained.config).eval()
        ours.load_state_dict(trained.state_dict())
        conversion = BlockConversion(is_native=True, record=dataclasses.replace(spec, mode=mode), listed_blocks=tables)
        conversion.adapt(ours, family)
        with torch.inference_mode():
            answers.append(ours(input_ids=input_ids, attention_mask=mask).last_hidden_state[mask == 1].numpy())
    right, one_seed_for_all, block_0 = answers
    assert_close(right, expected, atol=1e-5)
    for wrong in (one_seed_for_all, block_0):
        assert np.abs(wrong - expected).max() > 0.01


def test_rows_are_drawn_for_a_last_block_that_is_not_full() -> None:
    table = random_table(**SIZES, random_blocks=1, seed=0)
    assert table.shape == (HEADS, BLOCKS - 2, 1)
    assert table.min() >= 1
    assert table.max() <= BLOCKS - 2


def test_more_random_blocks_than_there_are_is_refused() -> None:
    for tokens, random_blocks, most, advice in (
        *((TOKENS, count, 3, r"random=3 or fewer, or mode=hf_eval") for count in (0, 4)),
        *((tokens, 1, 0, r"a smaller block, a larger max_len, or mode=") for tokens in (1, 48)),
    ):
        sizes = rf"{tokens} tokens are {-(-tokens // BLOCK_SIZE)} blocks of 16"
        message = rf"^A table of {random_blocks} random blocks .* {sizes}.* {most} to draw from\.\nUse {advice}"
        with named_case(tokens, random_blocks), pytest.raises(InputError, match=message):
            random_table(heads=HEADS, max_tokens=tokens, block_size=BLOCK_SIZE, random_blocks=random_blocks, seed=0)


def a_table(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, BLOCKS, shape)


def test_a_table_is_read_for_every_layer(tmp_path: Path) -> None:
    for dtype in (np.int32, np.int64, np.uint8):
        file, table = tmp_path / "table.npy", a_table(LAYERS, HEADS, BLOCKS - 2, 5).astype(dtype)
        np.save(file, table)
        of_layers = read_table(file, **SIZES, layers=LAYERS)
        assert [layer.dtype for layer in of_layers] == [np.int32] * LAYERS, dtype
        np.testing.assert_array_equal(np.stack(of_layers), table)
        np.save(file, table[1])
        np.testing.assert_array_equal(np.stack(read_table(file, **SIZES, layers=LAYERS)), np.stack([table[1]] * LAYERS))


def with_entry(entry: int) -> np.ndarray:
    table = a_table(HEADS, BLOCKS - 2, 3)
    table[2, 5, 1] = entry
    return table


BAD_TABLES = {
    "of one head": (a_table(1, 6, 3), r"shape \[1, 6, 3\]; it must be \[4, 6, random blocks\], or \[2, 4, 6, random"),
    "of three layers": (
        a_table(3, 4, 6, 3),
        r"shape \[3, 4, 6, 3\].*: 2 layers, 4 heads, .*\nMake a table for a text of",
    ),
    "of one axis": (a_table(6), r"shape \[6\]"),
    "of floats": (a_table(4, 6, 3) * 1.0, r"the table is of type float64; .*\nWrite it as integers: array\.astype"),
    "with a block too many": (with_entry(8), r"lists block 8 at \[2, 5, 1\]; the longest text has the blocks 0 to 7\."),
    "with a negative block": (with_entry(-1), r"lists block -1 at \[2, 5, 1\].*\nCount blocks from 0, .* by block="),
}


def test_a_table_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for name, (table, message) in BAD_TABLES.items():
        np.save(tmp_path / "table.npy", table)
        with named_case(name), pytest.raises(InputError, match=rf"(?s)table\.npy: .*{message}"):
            read_table(tmp_path / "table.npy", **SIZES, layers=LAYERS)


class _Attack:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return pytest.fail, ("a pickle was run",)


def damaged_files(directory: Path) -> dict[str, Path]:
    """Files that no reader may take, and none may fail on otherwise than by an InputError."""
    whole, archive = directory / "whole.npy", directory / "whole.npz"
    np.save(whole, a_table(HEADS, BLOCKS - 2, 3))
    np.savez(archive, full_kv_num_blocks=np.ones((1, BLOCKS), int), full_kv_indices=np.zeros((1, BLOCKS, 1), int))
    contents = {
        "empty": b"",
        "cut": whole.read_bytes()[:-8],
        "larger than the file": whole.read_bytes().replace(b"(4, 6, 3)", b"(4, 6, 9)"),
        "larger than any memory": whole.read_bytes().replace(b"(4, 6, 3), }       ", b"(9, 999999999), }  "),
        "header without an end": whole.read_bytes().replace(b"}", b"("),
        "pickle": pickle.dumps(_Attack()),
        "damaged archive": bytes(byte ^ (40 < place < 400) for place, byte in enumerate(archive.read_bytes())),
    }
    files = {name: directory / name for name in (*contents, "objects")}
    for name, content in contents.items():
        files[name].write_bytes(content)
    with files["objects"].open("wb") as objects:
        np.save(objects, np.array([_Attack()], object), allow_pickle=True)
    return files | {"missing": directory / "missing", "a directory": directory}


def test_damaged_files_are_refused_by_both_readers_and_no_pickle_is_run(tmp_path: Path) -> None:
    for name, file in damaged_files(tmp_path).items():
        with pytest.raises(
            InputError, match=r"(cannot be read: |several arrays).*\nWrite it with numpy\.save\(file, table\)"
        ):
            read_table(file, **SIZES, layers=LAYERS)
        with pytest.raises(InputError, match=r"cannot be read: .*\nWrite it with numpy\.savez\(file, full_kv_num"):
            read_block_lists(file, **SIZES)
        assert file.name == name or name == "a directory"


def test_a_file_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", a_table(HEADS, BLOCKS - 2, 3))
    np.savez(tmp_path / "lists.npz", kv_num_blocks=np.zeros((1, BLOCKS), int))
    with pytest.raises(InputError, match=r"lists\.npz holds several arrays"):
        read_table(tmp_path / "lists.npz", **SIZES, layers=LAYERS)
    for name in ("table.npy", "lists.npz"):
        with pytest.raises(InputError, match=rf"{name} holds no full_kv_num_blocks and no full_kv_indices\.\nWrite it"):
            read_block_lists(tmp_path / name, **SIZES)


def save_lists(file: Path, counts: object, indices: object, **others: object) -> Path:
    np.savez(file, full_kv_num_blocks=np.array(counts), full_kv_indices=np.array(indices), **others)
    return file


def test_lists_are_cut_to_the_longest_and_filled_up(tmp_path: Path) -> None:
    sizes = {"heads": 2, "max_tokens": 33, "block_size": 16}
    counts, indices = [[2, 0, 1]], [[[2, 0, 9], [7, 7, 7], [1, -5, 0]]]
    expected = [[[2, 0], [-1, -1], [1, -1]]]
    for batch in ((), (None,)):
        file = save_lists(tmp_path / "lists.npz", np.array(counts)[batch], np.array(indices)[batch])
        got = read_block_lists(file, **sizes)
        assert got.dtype == np.int32
        assert got.tolist() == expected
    both_heads = save_lists(tmp_path / "lists.npz", counts * 2, indices * 2)
    assert read_block_lists(both_heads, **sizes).tolist() == expected * 2


def test_a_mask_that_pytorch_made_is_read(tmp_path: Path) -> None:
    def every_second_block(batch, head, query, key):
        return (query // BLOCK_SIZE - key // BLOCK_SIZE) % 2 == 0

    length = BLOCKS * BLOCK_SIZE
    mask = create_block_mask(every_second_block, None, HEADS, length, length, device="cpu", BLOCK_SIZE=BLOCK_SIZE)
    arrays = {
        name: getattr(mask, name).numpy()
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    }
    np.savez(tmp_path / "lists.npz", **arrays)
    got = read_block_lists(tmp_path / "lists.npz", **SIZES)
    assert got.shape == (HEADS, BLOCKS, BLOCKS // 2)
    assert (got == [[0, 2, 4, 6], [1, 3, 5, 7]] * (BLOCKS // 2)).all()


def test_blocks_that_are_seen_in_part_are_refused(tmp_path: Path) -> None:
    length = BLOCKS * BLOCK_SIZE
    causal = create_block_mask(
        lambda batch, head, query, key: query >= key, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK_SIZE
    )
    file, whole = tmp_path / "lists.npz", (causal.full_kv_num_blocks, causal.full_kv_indices)
    save_lists(file, *(values.numpy() for values in whole), kv_num_blocks=causal.kv_num_blocks.numpy())
    with pytest.raises(InputError, match=r"kv_num_blocks is not 0, .* are partial: .*\nChoose a pattern"):
        read_block_lists(file, **SIZES)


ONES, ZEROS = np.ones((1, BLOCKS), int), np.zeros((1, BLOCKS, 2), int)
BAD_LISTS = {
    "of too few blocks": (ONES[:, :7], ZEROS[:, :7], r"shapes \[1, 7\] and \[1, 7, 2\]; they must be \[H, 8\] and"),
    "of three heads": (ONES[[0] * 3], ZEROS[[0] * 3], r"with 1 or 4 for H: 120 tokens are 8 blocks of 16"),
    "of more than there is room for": (3 * ONES, ZEROS, r"holds 3 to 3, .* 0 to 2 blocks\.\nWrite both"),
    "of fewer than none": (-ONES, ZEROS, r"full_kv_num_blocks holds -1 to -1"),
    "of counts that are not integers": (ONES > 0, ZEROS, r"full_kv_num_blocks is of type bool"),
    "of a block too many": (2 * ONES, ZEROS + np.array([7, 8]), r"lists block 8 at \[0, 0, 1\]; .* the blocks 0 to 7"),
}  # fmt: skip


def test_lists_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for name, (counts, indices, message) in BAD_LISTS.items():
        file = save_lists(tmp_path / "lists.npz", counts, indices)
        with named_case(name), pytest.raises(InputError, match=rf"(?s)lists\.npz: .*{message}"):
            read_block_lists(file, **SIZES)
