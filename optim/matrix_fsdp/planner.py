"""Which rank owns which matrix: arXiv 2607.05895, the planners by role, by scope and by cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from peerloom.optim.matrix_fsdp.errors import ShardingError

Shape = tuple[int, ...]
Policy = Literal["role_greedy", "scope_greedy", "cost_aware"]
Cost = Literal["numel", "newton_schulz"]

NS_STEPS = 5
ADAMW_FLOPS = 12  # an element a step, beside the flops of Newton-Schulz
WORKSPACE_CAP = 1.25  # how much larger a unit's largest segment may get for a better balance; the paper's is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What moves as one: a matrix alone, or all that is not a matrix in a unit (the tail)."""

    names: tuple[str, ...]
    numel: int
    cost: int
    owner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds of one parameter: rows [first_row, first_row + shape[0]); all of it unless it is spread."""

    name: str
    shape: Shape
    first_row: int = 0

    @property
    def numel(self) -> int:
        return numel(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """One unit: its roles in model order, and the parameters that are spread over all ranks by rows."""

    name: str
    shapes: Mapping[str, Shape]
    roles: tuple[Role, ...]
    spread: tuple[str, ...]
    world_size: int

    def pieces(self, rank: int) -> list[Piece]:
        """What `rank` holds, in the order of its memory: whole matrices, its tail, then its rows of what is spread."""
        owned = sorted((role for role in self.roles if role.owner == rank), key=self._is_tail)
        whole = [Piece(name=name, shape=self.shapes[name]) for role in owned for name in role.names]
        return whole + [self.rows(name, rank) for name in self.spread]

    def rows(self, name: str, rank: int) -> Piece:
        """The rows of a spread parameter that `rank` holds; none are left out, and counts differ by one at most."""
        count, *rest = self.shapes[name]
        first, end = (count * r // self.world_size for r in (rank, rank + 1))
        return Piece(name=name, shape=(end - first, *rest), first_row=first)

    def owned_numel(self, rank: int) -> int:
        return sum(piece.numel for piece in self.pieces(rank))

    @property
    def numel(self) -> int:
        return sum(numel(shape) for shape in self.shapes.values())

    @property
    def largest(self) -> int:
        """max_r O_{B,r}, in elements."""
        return max(self.owned_numel(rank) for rank in range(self.world_size))

    @property
    def gamma(self) -> float:
        """max_r O_{B,r} / (P_B / W): 1 is parity with FSDP, W when one rank owns the whole unit."""
        return self.largest * self.world_size / self.numel if self.numel else 1.0

    def _is_tail(self, role: Role) -> bool:
        return len(self.shapes[role.names[0]]) != 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPlan:
    """Owners of all parameters of a model; `policy` is the one that was taken, never "cost_aware"."""

    world_size: int
    policy: str
    cost: str
    units: tuple[UnitPlan, ...]

    def load(self, rank: int) -> int:
        """Elements that `rank` holds at rest."""
        return sum(unit.owned_numel(rank) for unit in self.units)

    def cost_of(self, rank: int) -> int:
        """Cost of the roles that `rank` owns; what is spread costs each rank the same and is left out."""
        return sum(role.cost for unit in self.units for role in unit.roles if role.owner == rank)

    def owner_of(self, name: str) -> int | None:
        """The rank that holds `name` whole; None when it is spread. Raises KeyError for an unknown name."""
        for unit in self.units:
            if name in unit.spread:
                return None
            for role in unit.roles:
                if name in role.names:
                    return role.owner
        raise KeyError(name)

    @property
    def imbalance(self) -> float:
        """Largest load over mean load, in elements."""
        return _imbalance([self.load(rank) for rank in range(self.world_size)])

    @property
    def cost_imbalance(self) -> float:
        """Largest cost over mean cost: how long the optimizer step takes beside an even split."""
        return _imbalance([self.cost_of(rank) for rank in range(self.world_size)])

    def checksum(self) -> str:
        """SHA-256 in hex over the whole plan: ranks whose plans differ must not exchange anything."""
        written = json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(written.encode()).hexdigest()

    def table(self) -> str:
        """Owner loads, gamma_B of each unit and the imbalance, for a terminal."""
        ranks = range(self.world_size)
        width = max([len(unit.name) for unit in self.units] + [len("imbalance")])
        lines = [f"{'unit':<{width}} {'gamma':>6} " + " ".join(f"{f'rank {rank}':>12}" for rank in ranks)]
        for unit in self.units:
            loads = " ".join(f"{unit.owned_numel(rank):>12,}" for rank in ranks)
            lines.append(f"{unit.name:<{width}} {unit.gamma:>6.2f} {loads}")
        lines.append(f"{'total':<{width}} {'':>6} " + " ".join(f"{self.load(rank):>12,}" for rank in ranks))
        lines.append(f"{'imbalance':<{width}} {self.imbalance:>6.2f} in elements, {self.cost_imbalance:.2f} in cost")
        return "\n".join(lines)


def plan_owners(
    shapes: Mapping[str, Mapping[str, Shape]],
    world_size: int,
    policy: Policy = "role_greedy",
    *,
    cost: Cost = "numel",
    spread: Collection[str] = (),
    outer: Collection[str] = (),
    frozen: Collection[str] = (),
) -> OwnerPlan:
    """Gives every matrix, and the tail of every unit, one owner among `world_size` ranks.

    `shapes` is {unit: {parameter: shape}} in model order, each parameter once. Roles go to the least loaded rank (ties:
    the lowest), largest first (ties: model order): `role_greedy` sorts within a unit and carries the loads on,
    `scope_greedy` sorts the roles of all units together, and `cost_aware` takes the scope plan where that lowers the
    highest load and no unit's largest segment grows past 1.25 times the largest of the role plan, else the role plan.
    (The paper's cap is not known. One of 1.25 times a unit's mean bytes, over W times the largest segment, would rule
    out every plan with gamma over 1.25, and so every plan of the paper's own blocks from 4 ranks on, by role too.)
    `cost` is what a role weighs: its elements, or the flops of its optimizer step. Those are of five Newton-Schulz
    steps, 5 (4 s^2 l + 2 s^3) with s the short side; of AdamW for `outer` matrices (embeddings and head) and for all
    that is no matrix; none for `frozen` parameters, which then go where the fewest elements are.
    Parameters named in `spread` have no owner: each rank holds an even share of their rows.
    Raises ShardingError.
    """
    _check(shapes, world_size, policy, cost, spread)
    idle, by_adamw = frozenset(frozen), frozenset(outer)

    def weigh(named: Mapping[str, Shape]) -> int:
        if cost == "numel":
            return sum(map(numel, named.values()))
        return sum(_flops(shape, name in by_adamw) for name, shape in named.items() if name not in idle)

    if policy != "cost_aware":
        return _greedy(shapes, world_size, policy, cost, weigh, spread)
    by_role = _greedy(shapes, world_size, "role_greedy", cost, weigh, spread)
    by_scope = _greedy(shapes, world_size, "scope_greedy", cost, weigh, spread)
    gains = by_scope.cost_imbalance < by_role.cost_imbalance
    largest_by_role, largest_by_scope = (max(unit.largest for unit in plan.units) for plan in (by_role, by_scope))
    return by_scope if gains and largest_by_scope <= WORKSPACE_CAP * largest_by_role else by_role


def numel(shape: Shape) -> int:
    """Elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class _Draft:
    """A role without its owner; `index` is its place in the whole model."""

    unit: str
    index: int
    names: tuple[str, ...]
    numel: int
    cost: int


def _greedy(
    shapes: Mapping[str, Mapping[str, Shape]],
    world_size: int,
    policy: str,
    cost: str,
    weigh: Callable[[Mapping[str, Shape]], int],
    spread: Collection[str],
) -> OwnerPlan:
    drafts = _drafts(shapes, weigh, spread)
    owners = [0] * len(drafts)
    loads, elements = [0] * world_size, [0] * world_size
    scopes = [drafts] if policy == "scope_greedy" else [[d for d in drafts if d.unit == unit] for unit in shapes]
    for scope in scopes:
        for draft in sorted(scope, key=_heaviest_first):
            weighed = loads if draft.cost else elements
            rank = min(range(world_size), key=lambda rank: (weighed[rank], rank))
            owners[draft.index] = rank
            loads[rank] += draft.cost
            elements[rank] += draft.numel
    units = tuple(
        UnitPlan(
            name=unit,
            shapes=dict(named),
            roles=tuple(
                Role(names=draft.names, numel=draft.numel, cost=draft.cost, owner=owners[draft.index])
                for draft in drafts
                if draft.unit == unit
            ),
            spread=tuple(name for name in named if name in spread),
            world_size=world_size,
        )
        for unit, named in shapes.items()
    )
    return OwnerPlan(world_size=world_size, policy=policy, cost=cost, units=units)


def _drafts(
    shapes: Mapping[str, Mapping[str, Shape]], weigh: Callable[[Mapping[str, Shape]], int], spread: Collection[str]
) -> list[_Draft]:
    drafts: list[_Draft] = []
    for unit, named in shapes.items():
        owned = {name: shape for name, shape in named.items() if name not in spread}
        groups = [(name,) for name, shape in owned.items() if len(shape) == 2]
        tail = tuple(name for name, shape in owned.items() if len(shape) != 2)
        for names in groups + ([tail] if tail else []):
            of_role = {name: owned[name] for name in names}
            drafts.append(_Draft(unit, len(drafts), names, sum(map(numel, of_role.values())), weigh(of_role)))
    return drafts


def _heaviest_first(draft: _Draft) -> tuple[int, int, int]:
    return -draft.cost, 0 if draft.cost else -draft.numel, draft.index


def _flops(shape: Shape, by_adamw: bool) -> int:
    if len(shape) != 2 or by_adamw:
        return ADAMW_FLOPS * numel(shape)
    short, long = sorted(shape)
    return NS_STEPS * (4 * short * short * long + 2 * short**3)


def _imbalance(loads: Sequence[int]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _check(
    shapes: Mapping[str, Mapping[str, Shape]], world_size: int, policy: str, cost: str, spread: Collection[str]
) -> None:
    if world_size < 1:
        raise ShardingError(f"a plan needs one rank or more, not {world_size}")
    if policy not in ("role_greedy", "scope_greedy", "cost_aware"):
        raise ShardingError(f"policy {policy!r} is none of role_greedy, scope_greedy, cost_aware")
    if cost not in ("numel", "newton_schulz"):
        raise ShardingError(f"cost {cost!r} is neither numel nor newton_schulz")
    names = [name for named in shapes.values() for name in named]
    if len(set(names)) != len(names):
        raise ShardingError(f"parameter {next(n for n in names if names.count(n) > 1)} is in the plan twice")
    known = {name: shape for named in shapes.values() for name, shape in named.items()}
    for name in spread:
        if not known.get(name):
            raise ShardingError(f"{name} cannot be spread by rows: it is no parameter with rows of this model")
