"""Scenarios that more than one test plays; `python -m tests.sim.stories` prints the digest of one of them."""

from __future__ import annotations

import asyncio
import random

from tests.sim.swarm import STEP_S, Plan, Swarm, play, spec


def uneven(index: int) -> float:
    """Step times that differ by up to 20 % either way."""
    return STEP_S * (0.8 + 0.4 * random.Random(f"speed {index}").random())


def rounds(count: int, *, seed: int = 1, rounds: int = 20, even: bool = False, **gasloc: object) -> Swarm:
    """`count` nodes train until each has finished `rounds` rounds, then drain."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(rounds)
        await swarm.drain()

    step_s = (lambda index: STEP_S) if even else uneven
    return play(Plan(count=count, seed=seed, spec=spec(seed, **gasloc), step_s=step_s), scenario)


def troubled(seed: int = 1) -> Swarm:
    """Eight nodes with a kill, a restart, a partition and a dead worker on the way."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(3)
        await swarm.kill(2)
        swarm.part([0, 1], [5, 6])
        await asyncio.sleep(7)
        swarm.members[3].worker.die()
        swarm.start(2)
        await asyncio.sleep(20)
        swarm.part([0, 1], [5, 6], healed=True)
        await swarm.until_round(15)
        await swarm.drain()

    return play(Plan(count=8, seed=seed, spec=spec(seed), step_s=uneven), scenario)


if __name__ == "__main__":
    print(troubled().digest())
