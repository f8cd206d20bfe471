"""State and weights are functions of the set of messages: order, batches, periods and joining late change no bit."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peerloom.optim import subcge_state, subcge_targets, subcge_weights
from peerloom.optim.subcge import SCALAR_LIMIT, Message, SubCGE
from peerloom.optim.subcge_random import NORMAL_LIMIT, coordinates
from peerloom.optim.subcge_subspace import Subspace
from tests.unit.optim.subcge.models import Tied, bits, equal, tied

PERIOD = 5
NO_ROOM = (2**63 - 1) // (100 * NORMAL_LIMIT)  # the most that a run with scalars up to 100 takes; one more is refused
MESSAGES = st.lists(
    st.builds(
        Message,
        origin=st.sampled_from([-(2**63), -7, 0, 2**63 - 1]),
        sequence=st.integers(0, 2**40),
        step=st.integers(0, 4 * PERIOD - 1),
        scalar=st.integers(-SCALAR_LIMIT, SCALAR_LIMIT),
    ),
    max_size=25,
    unique_by=lambda message: message[:2],
)


def flow(model: Tied, **changes: object) -> SubCGE:
    settings: dict[str, object] = {"rank": 3, "period": PERIOD, "eps": 1e-3, "lr": 1e-5, "run_seed": 7}
    return SubCGE(model, **(settings | changes))  # type: ignore[arg-type]


def live(model: Tied, messages: list[Message], chance: random.Random) -> SubCGE:
    """A node that gets messages in any order and batches while its own clock goes on."""
    node = flow(model, cached=chance.choice([1, 2, 4]))
    rest = chance.sample(messages, len(messages))
    for step in range(4 * PERIOD):
        node.advance(step)
        if chance.random() < 0.3:
            taken, rest = rest[: len(rest) // 3], rest[len(rest) // 3 :]
            node.apply(taken)
    node.apply(rest)
    node.rebuild()
    return node


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=8, deadline=None)
@given(messages=MESSAGES, chance=st.randoms(use_true_random=False))
def test_any_order_gives_the_same_bits(dtype: torch.dtype, messages: list[Message], chance: random.Random) -> None:
    models = [tied(dtype) for _ in range(4)]
    nodes = [live(model, messages, chance) for model in models[:2]]
    central = flow(models[2])
    central.apply(sorted(messages))
    joiner = flow(models[3])
    joiner.advance(2 * PERIOD)
    joiner.load_state(central.export_state())
    hashes = {node.state_hash() for node in [*nodes, central, joiner]}
    assert len(hashes) == 1
    assert all(equal(bits(models[0]), bits(model)) for model in models[1:])


@settings(max_examples=25, deadline=None)
@given(messages=MESSAGES.filter(bool), data=st.data())
def test_another_set_has_another_hash(messages: list[Message], data: st.DataObject) -> None:
    whole, less, changed = flow(tied()), flow(tied()), flow(tied())
    whole.apply(messages)
    less.apply(messages[1:])
    first = messages[0]
    changed.apply([first._replace(scalar=first.scalar - 1 if first.scalar > 0 else first.scalar + 1), *messages[1:]])
    assert len({whole.state_hash(), less.state_hash(), changed.state_hash()}) == 3
    assert flow(tied(), run_seed=8).state_hash() != flow(tied()).state_hash()


def test_a_late_message_goes_to_its_own_subspace() -> None:
    """At once, though its period is over; and the rebuilt sum has the bits of one that came in time."""
    early, late = tied(), tied()
    message = Message(1, 4, 2, 40_000_000)
    other = Message(1, 5, PERIOD + 1, -30_000_000)
    for model, parts in ((early, ([message, other], [])), (late, ([other], [message]))):
        node = flow(model)
        node.apply(parts[0])
        node.advance(2 * PERIOD)
        node.apply(parts[1])
        assert node.stale == (model is late)
        if node.stale:
            for mine, theirs in zip(bits(late), bits(early), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        node.rebuild()
        assert not node.stale
    assert equal(bits(early), bits(late))
    assert not equal(bits(early), bits(tied()))


class Seen(Subspace):
    """Knows how many there are at once."""

    alive = weakref.WeakSet[Subspace]()
    most = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        Seen.alive.add(self)
        Seen.most = max(Seen.most, len(Seen.alive))


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_periods_are_summed_a_few_at_a_time_to_the_same_bits(
    dtype: torch.dtype, folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [Message(1, at, at, (at % 7 - 3) * 10**8) for at in range(30 * PERIOD)]
    monkeypatch.setattr(subcge_targets, "_PIECE", 12)  # two rows of the embedding
    monkeypatch.setattr(subcge_weights, "Subspace", Seen)
    found = []
    for at_once in (1000, 4, 1):
        monkeypatch.setattr(subcge_weights, "_AT_ONCE", at_once)
        model = tied(dtype)
        node = flow(model, cached=1)
        node.advance(30 * PERIOD if folded else 0)
        Seen.alive.clear()
        Seen.most = 0
        node.absorb(messages)
        node.load_state(node.export_state())
        found.append(bits(model))
        kept = len(node.matrices)  # the current period's
        assert Seen.most >= 30 if at_once == 1000 else Seen.most <= at_once + kept
    assert all(equal(found[0], other) for other in found[1:]) and not equal(found[0], bits(tied(dtype)))


def test_sums_of_many_messages_are_worked_out_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [Message(1, at, at % PERIOD, at * 1000) for at in range(100)]
    widths = list[int]()

    def seen(seeds: torch.Tensor, keys: torch.Tensor, rank: int) -> torch.Tensor:
        widths.append(len(seeds) * len(keys))
        return coordinates(seeds, keys, rank)

    monkeypatch.setattr(subcge_state, "coordinates", seen)
    whole = flow(tied())
    whole.absorb(messages)
    assert widths == [300], "three matrices, in one"
    widths.clear()
    monkeypatch.setattr(subcge_state, "_PLACES", 7)
    pieces = flow(tied())
    pieces.absorb(messages)
    assert set(widths) == {6} and pieces.state_hash() == whole.state_hash()


def test_weights_do_not_drift_in_bf16() -> None:
    """2,000 steps far below a bf16 ulp each: one at a time they would all be lost."""
    model = tied(torch.bfloat16)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    node = flow(model, lr=1e-6, period=4000, base=base)
    exact = tied(torch.float32)
    for name, parameter in exact.named_parameters():
        parameter.data.copy_(base[name])
    reference = flow(exact, lr=1e-6, period=4000)
    messages = [Message(0, k, k, 65_536 * (k % 7)) for k in range(2000)]
    for start in range(0, 2000, 50):
        node.apply(messages[start : start + 50])
    reference.apply(messages)
    for mine, theirs in zip(bits(model), bits(exact), strict=True):
        assert torch.equal(mine, theirs.bfloat16())
    assert not equal(bits(model), list(base.values()))


def test_stores_may_be_given_and_are_used() -> None:
    """The base stays as it is; the anchor takes the periods that are over."""
    model = tied()
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    anchor = {name: torch.full_like(tensor, torch.nan) for name, tensor in base.items()}
    node = flow(model, base=base, anchor=anchor)
    node.apply([Message(0, 0, 0, 10**9)])
    node.advance(PERIOD)
    assert equal(list(base.values()), bits(tied()))
    matrices = [name for name, tensor in base.items() if tensor.dim() > 1]
    assert equal([anchor[name] for name in matrices], [model.get_parameter(name) for name in matrices])
    assert len(matrices) == len(node.matrices) == 3


def test_a_store_s_place_in_memory_changes_no_bit() -> None:
    """A mapped file's tensors lie where they lie; a product over other addresses may round differently."""
    sums = []
    for ahead in (0, 1, 3):
        model = wide()
        base = {name: _moved(tensor, ahead) for name, tensor in model.named_parameters()}
        anchor = {name: _moved(tensor, ahead) for name, tensor in model.named_parameters()}
        node = SubCGE(model, rank=8, period=PERIOD, eps=1e-3, lr=1e-3, run_seed=7, base=base, anchor=anchor)
        node.apply([Message(1, k, k % PERIOD, 999_983 * (k + 1)) for k in range(40)])
        node.advance(PERIOD)
        node.apply([Message(2, k, PERIOD, 999_983 * (k + 1)) for k in range(40)])
        sums.append([anchor["weight"].clone(), *bits(model)])
    assert equal(sums[0], sums[1]) and equal(sums[0], sums[2]) and not equal(sums[0][1:], bits(wide()))


def wide() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(67, 129)


def _moved(tensor: torch.Tensor, ahead: int) -> torch.Tensor:
    """A copy that lies so many elements off where torch would put it."""
    room = torch.empty(tensor.numel() + ahead)
    return room[ahead:].view(tensor.shape).copy_(tensor.detach())


def test_no_sum_can_overflow() -> None:
    node = flow(tied(), bound=2**31 - 1)
    capacity = node.state.capacity
    most = (2**31 - 1) * NORMAL_LIMIT  # what one message adds to an element, at most
    assert capacity * most <= 2**63 - 1 < (capacity + 1) * most
    state = node.export_state()
    full = {
        "periods": torch.tensor([0]),
        "counts": torch.tensor([capacity]),
        "sums": torch.full((1, *state["sums"].shape[1:]), capacity * (2**31 - 1)),
        "small": torch.full_like(state["small"], -capacity * (2**31 - 1) * NORMAL_LIMIT),
    }
    node.load_state(full)
    before = node.state_hash()
    with pytest.raises(OverflowError, match="the run has taken"):
        node.apply([Message(0, 1, PERIOD, 5)])
    assert node.state_hash() == before
    half = {"counts": torch.tensor([capacity - 1]), "sums": full["sums"] // 2, "small": full["small"] // 2}
    node.load_state(full | half)
    node.apply([Message(0, 1, PERIOD, 5)])
    with pytest.raises(OverflowError, match="the run has taken"):
        node.apply([Message(0, 2, PERIOD, 5)])


@pytest.mark.parametrize(
    "bad",
    [
        (0, 0, 0, 101),
        (0, 0, 0, -101),
        (0, -1, 0, 1),
        (0, 0, -1, 1),
        (2**63, 0, 0, 1),
        (0, 0, 0, 2**70),
        (0, 0, 0),
        ("a", 0, 0, 1),
        (0, 0, 0, 1.5),
    ],
)
def test_a_bad_message_changes_nothing(bad: tuple[int, ...]) -> None:
    model = tied()
    node = flow(model, bound=100)
    before = node.state_hash()
    with pytest.raises(ValueError, match="message"):
        node.apply([Message(0, 5, 0, 100), bad])
    assert node.state_hash() == before and equal(bits(model), bits(tied()))


def damaged(state: dict[str, torch.Tensor], name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in (state | {name: value}).items() if tensor is not None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("periods", None),
        ("periods", torch.tensor([1, 0])),
        ("periods", torch.tensor([-1, 0])),
        ("periods", torch.tensor([0.0, 1.0])),
        ("counts", torch.tensor([1, 0])),
        ("counts", torch.tensor([1, 2**62])),
        ("sums", torch.zeros(2, 1, 3, 3, dtype=torch.int64)),
        ("counts", torch.tensor([1, NO_ROOM])),
        ("sums", torch.full((2, 3, 3, 3), 101)),
        ("sums", torch.full((2, 3, 3, 3), -(2**63))),
        ("small", None),
        ("small", torch.zeros(17, dtype=torch.int64)),
        ("small", torch.full((18,), 200 * NORMAL_LIMIT + 1)),
        ("small", torch.full((18,), -(2**63))),
    ],
)
def test_a_state_that_cannot_be_is_refused(name: str, value: torch.Tensor | None) -> None:
    node = flow(tied(), bound=100)
    node.apply([Message(0, 0, 0, 50), Message(0, 1, PERIOD, 50)])
    before = node.state_hash()
    with pytest.raises(ValueError, match="state"):
        node.load_state(damaged(node.export_state(), name, value))
    assert node.state_hash() == before


def test_time_does_not_run_backwards() -> None:
    node = flow(tied())
    node.advance(PERIOD)
    with pytest.raises(ValueError, match="earlier period"):
        node.advance(PERIOD - 1)


@settings(max_examples=8, deadline=None)
@given(messages=MESSAGES, chance=st.randoms(use_true_random=False))
def test_what_is_retracted_was_never_there(messages: list[Message], chance: random.Random) -> None:
    gone = chance.sample(messages, len(messages) // 2)
    kept = [message for message in messages if message not in gone]
    model, other = tied(), tied()
    node, plain = flow(model), flow(other)
    node.advance(2 * PERIOD)
    node.apply(messages)
    plain.advance(2 * PERIOD)
    plain.apply(kept)
    assert node.state_hash(gone) == plain.state_hash() and node.state_hash() == node.state_hash([])
    node.retract(gone)
    node.rebuild()
    plain.rebuild()
    assert node.state_hash() == plain.state_hash()
    assert equal(bits(model), bits(other))
    with pytest.raises(ValueError, match="fewer than"):
        node.retract([Message(0, 0, 3 * PERIOD, 1)] * 26)


def test_a_folded_period_can_vanish_whole() -> None:
    model, message = tied(), Message(1, 0, 0, 10**6)
    before, node = bits(model), flow(model)
    node.apply([message])
    node.advance(PERIOD)
    node.retract([message])
    node.rebuild()
    assert equal(bits(model), before) and node.state_hash() == flow(tied()).state_hash()


def test_the_fixed_point_is_the_callers() -> None:
    coarse, fine = tied(), tied()
    flow(coarse, fraction_bits=8).apply([Message(1, 0, 0, 3)])
    flow(fine, fraction_bits=12).apply([Message(1, 0, 0, 3 << 4)])
    assert equal(bits(coarse), bits(fine))
