"""What a task asks its process between two local steps."""

from __future__ import annotations

from typing import Protocol


class Between(Protocol):
    """The daemon's commands that may come while local steps run; both calls carry out a Finish that has come."""

    def interrupted(self, number: int) -> bool:
        """Whether the local steps of that number are to end now."""
        ...

    def wait(self) -> None:
        """Returns once a command has come."""
        ...
