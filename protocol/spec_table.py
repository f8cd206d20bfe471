"""What every table of the RunSpec can do."""

from __future__ import annotations

from collections.abc import Iterator

from peerloom.protocol.errors import SpecError
from peerloom.protocol.spec_rules import Fault, faults


class Table:
    """A frozen dataclass whose fields carry their rules; faults between fields come from `cross()`."""

    __slots__ = ()

    def check(self) -> None:
        """Raises SpecError that names every bad field at once."""
        found = faults(self)
        if found:
            raise SpecError([str(fault) for fault in found])

    def cross(self) -> Iterator[Fault]:
        """Faults between fields that are each in range."""
        yield from ()
