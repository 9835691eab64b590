"""The order is a bijection, the same everywhere, and looks like chance."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from shared.data.order import BLOCK, Order, permute


def whole(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(size), size, seed, epoch)


SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 13, 31, 32, 33, 97, 255, 256, 257, 1021, 4095, 4096, 4097, 46677, 2**17 - 1, 2**17 + 1]


@pytest.mark.parametrize("size", SIZES)
def test_every_row_is_read_exactly_once(size: int) -> None:
    for seed, epoch in [(0, 0), (1, 0), (0, 1), (2**70, 3)]:
        assert np.array_equal(np.sort(whole(size, seed, epoch)), np.arange(size))


@pytest.mark.parametrize("size", [2**32 + 15, 2**33, 10**12 + 39, 2**62])
def test_huge_sizes_give_distinct_rows_within_range(size: int) -> None:
    sample = np.unique(np.concatenate([np.arange(50_000), size - 1 - np.arange(50_000)]))
    rows = permute(sample, size, 5, 0)
    assert len(np.unique(rows)) == len(sample)
    assert rows.min() >= 0 and rows.max() < size
    assert rows.mean() / size == pytest.approx(0.5, abs=0.005)  # 5 standard errors of 100,000 uniform draws


def test_golden_values() -> None:
    """If these change, runs that were started before read other batches from now on."""
    assert whole(10).tolist() == [7, 1, 9, 8, 0, 4, 6, 3, 5, 2]
    huge = permute(np.arange(4), 10**9 + 7, seed=1234, epoch=5)
    assert huge.tolist() == [659155086, 698132442, 863316743, 363402816]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 100, 1000, 2**40 + 3])
def test_agrees_with_the_definition_in_plain_integers(size: int) -> None:
    """Written a second time with Python's unbounded integers: no overflow or dtype rule of NumPy takes part."""

    def definition(index: int, seed: int, epoch: int) -> int:
        digest = hashlib.blake2b(f"row order: seed {seed}, epoch {epoch}".encode(), digest_size=64).digest()
        keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(8)]
        bits = 0
        while 2**bits < size:
            bits += 1
        low_bits = bits - bits // 2
        while True:
            halves = [index % 2**low_bits, index // 2**low_bits]
            for r, key in enumerate(keys):
                x = (halves[(r + 1) % 2] + key) % 2**64
                x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
                x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
                x ^= x >> 31
                halves[r % 2] ^= x % 2 ** (low_bits if r % 2 == 0 else bits - low_bits)
            index = halves[1] * 2**low_bits + halves[0]
            if index < size:
                return index

    positions = [0, size // 3, size // 2, size - 1]
    expected = [definition(position, 7, 2) for position in positions]
    assert permute(np.array(positions), size, 7, 2).tolist() == expected


def test_a_row_does_not_depend_on_which_others_are_asked_for() -> None:
    rows = whole(1000)
    assert permute(np.array([[999, 3], [3, 500]]), 1000, 0, 0).tolist() == [[rows[999], rows[3]], [rows[3], rows[500]]]
    assert permute(np.zeros(0, np.int64), 1000, 0, 0).shape == (0,)


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    size = 10_000
    orders = [whole(size, seed, epoch) for seed in range(4) for epoch in range(4)]
    for a in range(len(orders)):
        for b in range(a):
            # Unrelated orders agree at Poisson(1) positions: more than 12 has probability 6e-11.
            assert np.sum(orders[a] == orders[b]) <= 12
            # The correlation of two has standard deviation 1 / sqrt(size) = 0.01; 5 of them, 120 pairs: 7e-5.
            assert abs(np.corrcoef(orders[a], orders[b])[0, 1]) < 0.05


@pytest.mark.parametrize("size", [1000, 1024, 4097])
def test_no_trace_of_the_original_order_remains(size: int) -> None:
    num_orders = 400
    orders = np.stack([whole(size, seed) for seed in range(num_orders)])
    position = np.arange(size)
    # In a random permutation the number of fixed points, and of neighbours that stay neighbours, is Poisson with mean
    # 1 each; means over 400 orders have standard error 0.05; 5 of these are allowed.
    assert np.mean(np.sum(orders == position, axis=1)) == pytest.approx(1, abs=0.25)
    assert np.mean(np.sum(np.diff(orders, axis=1) == 1, axis=1)) == pytest.approx(1, abs=0.25)
    # Correlation of row with position, and of row with next row: standard deviation 1 / sqrt(size * 400) on average.
    limit = 5 / np.sqrt(size * num_orders)
    assert abs(np.mean([np.corrcoef(order, position)[0, 1] for order in orders])) < limit
    assert abs(np.mean([np.corrcoef(order[1:], order[:-1])[0, 1] for order in orders]) + 1 / size) < limit


@pytest.mark.parametrize("size", [3, 7, 8, 10])
def test_each_row_is_equally_likely_at_each_position(size: int) -> None:
    num_orders = 4000
    counts = np.zeros((size, size))
    for seed in range(num_orders):
        counts[np.arange(size), whole(size, seed)] += 1
    expected = num_orders / size
    # Rows and columns of the table have fixed sums, so (size - 1) / size times Pearson's statistic is chi-square with
    # (size - 1)^2 degrees of freedom, whose variance is twice that. Six standard deviations.
    statistic = np.sum((counts - expected) ** 2) / expected * (size - 1) / size
    freedom = (size - 1) ** 2
    assert statistic < freedom + 6 * np.sqrt(2 * freedom)


def test_consecutive_positions_come_from_the_same_permutation_across_blocks() -> None:
    size = 2 * BLOCK + 100
    expected = {epoch: whole(size, 3, epoch) for epoch in (0, 1)}
    order = Order(size, seed=3)
    for epoch, start, stop in [
        (0, 0, 5),
        (0, BLOCK - 2, BLOCK + 3),
        (1, BLOCK - 2, BLOCK + 3),
        (0, 2 * BLOCK, size),
        (0, 0, size),
        (1, 7, 7),
        (0, BLOCK - 1, BLOCK),
        (0, size, size),
    ]:
        assert np.array_equal(order.rows(epoch, start, stop), expected[epoch][start:stop])
