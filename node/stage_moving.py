"""A host too many leaves its stage for one without a host, when nobody stands by to take that one over."""

from __future__ import annotations

from peerloom.node.context import Context
from peerloom.node.stage_view import StageView
from peerloom.protocol.placement import turn_to_move

FIRST_S = 4.0  # a stage may be without a host for a moment: its worker starts again, its next host settles
STILL_S = 3.0  # without an update, after which hosts are asked whether they live
TURN_S = 6.0  # a node that moves has said so within: its record goes out after 2 s at most, and is read every second


class Moved(Exception):
    """The node has left its stage in order, and looks for another."""


class StageMoving:
    """Says when this host is to move; one whose owner has chosen its stage never is."""

    def __init__(self, context: Context, view: StageView) -> None:
        self._context, self._view = context, view
        self._missing: list[int] = []
        self._missing_since = 0.0
        self._applied, self._applied_at = -1, 0.0

    async def is_due(self, applied: int) -> bool:
        """Whether it is this node's turn, `applied` updates being made; asked every second or so."""
        now = self._context.clock.monotonic()
        if applied != self._applied:
            self._applied, self._applied_at = applied, now
        if self._context.settings.stage is not None or not self._is_surplus():
            return False
        if now - self._applied_at > STILL_S:
            await self._view.probe()  # only neighbours learn of a death by themselves, and records outlive their node
        missing, now = self._view.missing(), self._context.clock.monotonic()
        if missing != self._missing:
            self._missing, self._missing_since = missing, now
        return self._is_turn(now) and await self._is_surplus_indeed() and self._is_turn(now)

    def _is_surplus(self) -> bool:
        return bool(self._view.hosts(self._view.own().stage))

    def _is_turn(self, now: float) -> bool:
        turn = turn_to_move(self._view.own(), self._view.claims(), self._context.spec.pipeline.stages)
        return turn is not None and now - self._missing_since >= FIRST_S + turn * TURN_S

    async def _is_surplus_indeed(self) -> bool:
        """Another host of this stage answers."""
        for record in self._view.hosts(self._view.own().stage):
            if await self._view.check(record.peer_id):
                return True
        return False
