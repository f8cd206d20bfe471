"""How many nodes a find asks."""

from __future__ import annotations

from peerloom.node.dht_looks import ALL, FEW, OFTEN, SELDOM, Looks


def asked(looks: Looks, finds: int, few: set[str], everything: set[str]) -> list[int]:
    """How many nodes each of so many finds asks, where the nearest hold `few` and all hold `everything`."""
    counts = []
    for _ in range(finds):
        counts.append(looks.ask(stored_here=False))
        looks.found(everything if counts[-1] == ALL else few)
    return counts


def gaps(counts: list[int]) -> list[int]:
    """The finds between those that ask all."""
    at = [index for index, count in enumerate(counts) if count == ALL]
    return [after - before - 1 for before, after in zip(at, at[1:], strict=False)]


def test_while_the_nearest_hold_everything_all_are_asked_seldom() -> None:
    counts = asked(Looks(), 100, {"a", "b"}, {"a", "b"})
    assert counts[0] == ALL and set(counts) == {FEW, ALL}
    assert gaps(counts) == [OFTEN, 4 * OFTEN, SELDOM, SELDOM, SELDOM]
    assert Looks().ask(stored_here=True) == ALL


def test_while_others_hold_more_all_are_asked_often() -> None:
    looks = Looks()
    assert set(gaps(asked(looks, 40, {"a"}, {"a", "b"}))) == {OFTEN}
    assert gaps(asked(looks, 60, {"a", "b"}, {"a", "b"}))[-1] == SELDOM
    counts = asked(looks, 80, {"a"}, {"a", "b"})
    assert gaps(counts)[-1] == OFTEN
    looks.found({"a", "b"})
    assert looks.ask(stored_here=True) == FEW - 1
