"""The directions of tensors of at most one dimension: fixed bits, a normal's distribution, sums exact in any order."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peerloom.optim.subcge import SCALAR_LIMIT, SubCGE
from peerloom.optim.subcge_random import NORMAL_BITS, NORMAL_LIMIT, key_of, message_seeds, mix, normals
from peerloom.optim.subcge_small import _CHUNK, _ROWS, SmallTensors
from peerloom.protocol.spec_seedflow import NORMAL_LIMIT as SPECS_LIMIT

SIZES = [5, 1, 8, 3]
INT64 = st.integers(-(2**63), 2**63 - 1)
KEYS = [key_of("a"), key_of("b"), key_of("c"), key_of("d")]


def test_bits_are_those_written_here() -> None:
    """A machine or a library that draws others would leave every swarm."""
    packed = hashlib.sha256(normals().to(torch.int16).numpy().astype("<i2").tobytes()).hexdigest()
    assert packed == "2f37fbf1f3bfaa91bcf8a5cd05fe89738a0397e8f8b84ad8c8b5ecc5ed7db406"
    drawn = (SmallTensors(KEYS, SIZES).normals(9) * 2**NORMAL_BITS).tolist()
    assert drawn == [252, -45, -184, -100, 52, 126, -253, -167, 66, -196, -305, -188, 173, 447, 133, -259, 157]


def test_the_table_is_symmetric_bounded_and_far_from_a_tie() -> None:
    """So that no machine's logarithm can round an entry to another integer."""
    from statistics import NormalDist

    values = normals()
    assert torch.equal(values, -values.flip(0)) and float(values.max()) == NORMAL_LIMIT == SPECS_LIMIT
    assert torch.equal(values[:32768], values[:32768].sort().values)
    quantiles = (NormalDist().inv_cdf((65536 + 2 * index + 1) / 131072) * 2**NORMAL_BITS for index in range(32768))
    assert min(abs(value % 1 - 0.5) for value in quantiles) > 1e-5
    assert SCALAR_LIMIT * NORMAL_LIMIT * _ROWS < 2**53, "else a product would round"


def test_numbers_have_a_normals_distribution_and_are_not_correlated() -> None:
    small = SmallTensors([key_of("long")], [400_000])
    one, other = small.normals(1).double(), small.normals(2).double()
    assert abs(one.mean()) < 0.01 and abs(one.var() - 1) < 0.01
    assert abs((one**3).mean()) < 0.03 and abs((one**4).mean() - 3) < 0.06
    for level in (-3.0, -2.0, -1.0, -0.1, 0.3, 1.5, 3.5):
        expected = torch.special.ndtr(torch.tensor(level, dtype=torch.float64))
        assert abs((one < level - 2.0**-9).double().mean() - expected) < 0.003
    assert abs((one * other).mean()) < 0.01
    for lag in (1, 2, 3, 4, 576):
        assert abs((one[:-lag] * one[lag:]).mean()) < 0.01 and abs((one[:-lag] ** 2 * one[lag:] ** 2).mean() - 1) < 0.03


def test_a_gaussian_of_its_own_estimates_without_bias_where_a_product_of_two_was_heavier() -> None:
    """E[<G, z> z] = G, and E z^4 = 3, not 9, over messages."""
    gradient = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    small = SmallTensors([key_of("v")], [40])
    seeds = message_seeds(1, torch.zeros(5000, dtype=torch.int64), torch.arange(5000))
    z = torch.stack([small.normals(seed) for seed in seeds.tolist()]).double()
    mean = ((z @ gradient).unsqueeze(1) * z).mean(0)
    assert (mean * gradient).sum() / mean.norm() / gradient.norm() > 0.97
    assert (mean * gradient).sum() / gradient.norm() ** 2 == pytest.approx(1, abs=0.1)
    assert float((z**4).mean()) == pytest.approx(3, abs=0.1)


@settings(max_examples=30, deadline=None)
@given(
    messages=st.lists(st.tuples(INT64, st.integers(-SCALAR_LIMIT, SCALAR_LIMIT)), max_size=20)
)
def test_a_sum_is_that_of_integers(messages: list[tuple[int, int]]) -> None:
    small = SmallTensors(KEYS, SIZES)
    seeds, scalars = (torch.tensor([one[part] for one in messages], dtype=torch.int64) for part in (0, 1))
    expected = [0] * sum(SIZES)
    for seed, scalar in messages:
        numbers = (small.normals(seed).double() * 2**NORMAL_BITS).tolist()
        expected = [total + scalar * int(number) for total, number in zip(expected, numbers, strict=True)]
    assert small.sum_of(seeds, scalars).tolist() == expected


def test_a_sum_is_exact_with_the_largest_scalars_and_over_many_blocks() -> None:
    """More messages than one product takes, all at the limit; and a tensor longer than is hashed at a time."""
    few, seeds = SmallTensors(KEYS[:1], [3]), mix(torch.arange(_ROWS + 700))
    scalars = torch.full((len(seeds),), SCALAR_LIMIT)
    numbers = torch.stack([few.normals(seed) for seed in seeds.tolist()]).double() * 2**NORMAL_BITS
    assert few.sum_of(seeds, scalars).tolist() == [SCALAR_LIMIT * int(one) for one in numbers.sum(0).tolist()]
    long = SmallTensors(KEYS[:1], [4 * _CHUNK + 9])
    whole = long.sum_of(seeds[:3], torch.tensor([1, -2, 3]))
    parts = [long.normals(seed) * 2**NORMAL_BITS for seed in seeds[:3].tolist()]
    assert torch.equal(whole, (parts[0] - 2 * parts[1] + 3 * parts[2]).long())


def test_each_message_and_each_tensor_has_numbers_of_its_own() -> None:
    small = SmallTensors(KEYS, SIZES)
    a, _, c, _ = small.split(small.normals(1))
    assert not torch.equal(a, c[:5]) and not torch.equal(a, small.split(small.normals(2))[0])
    assert torch.equal(SmallTensors(KEYS[2:3], [8]).normals(1), c), "whatever other tensors there are"


def test_a_model_of_small_tensors_alone() -> None:
    model = nn.LayerNorm(6)
    node = SubCGE(model, rank=2, period=5, eps=1e-3, lr=1e-3, run_seed=1)
    assert node.matrices == () and node.names == ("weight", "bias")
    node.apply([(0, 0, 0, 1 << 16)])
    node.advance(5)
    node.apply([(0, 1, 2, 1 << 16)])  # late, and in place at once
    whole = SubCGE(nn.LayerNorm(6), rank=2, period=5, eps=1e-3, lr=1e-3, run_seed=1)
    whole.load_state(node.export_state())
    assert all(map(torch.equal, model.parameters(), whole.model.parameters()))
    assert node.state_hash() == whole.state_hash() and not torch.equal(model.bias, torch.zeros(6))
