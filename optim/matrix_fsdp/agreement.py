"""What all ranks must have in common before the first weight moves, and one sentence for all when they have not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from peerloom.optim.matrix_fsdp.errors import ShardingError
from peerloom.optim.matrix_fsdp.links import Links

_VALUE_BYTES = 96  # of each fact; a longer one is cut, which a digest is not
_PROBLEM_BYTES = 512


def agree(groups: Sequence[Links], device: torch.device, facts: Mapping[str, str], problem: str = "") -> None:
    """Raises the same ShardingError on every rank when one has a problem, or a fact differs between ranks.

    `groups` are the dimensions of the mesh, inner first: what is found in one is told in the next, and the first once
    more, since ranks of one replica have other partners in the outer dimension. Records have a fixed size, so ranks
    with different plans still understand each other. Ranks are named as the default group numbers them.
    """
    for links in [*groups, *groups[:-1]]:
        rows = _exchanged(links, device, [*facts.values()], problem)
        problem = _first_problem(rows, [*facts], links.ranks)
    if problem:
        raise ShardingError(problem)


def _first_problem(rows: list[tuple[list[str], str]], names: list[str], ranks: Sequence[int]) -> str:
    for rank, (_, problem) in zip(ranks, rows, strict=True):
        if problem:
            return problem if problem.startswith("rank ") else f"rank {rank}: {problem}"
    for rank, (values, _) in zip(ranks, rows, strict=True):
        for name, first, value in zip(names, rows[0][0], values, strict=True):
            if value != first:
                return f"rank {rank} has another {name} than rank {ranks[0]}: {value} instead of {first}"
    return ""


def _exchanged(links: Links, device: torch.device, values: list[str], problem: str) -> list[tuple[list[str], str]]:
    sizes = [_VALUE_BYTES] * len(values) + [_PROBLEM_BYTES]
    written = b"".join(_padded(text, size) for text, size in zip([*values, problem], sizes, strict=True))
    record = torch.frombuffer(bytearray(written), dtype=torch.uint8).to(device)
    rows: list[tuple[list[str], str]] = []
    for row in links.exchange(record, "the comparison of plans"):
        fields = [_text(part) for part in torch.split(row.cpu(), sizes)]
        rows.append((fields[:-1], fields[-1]))
    return rows


def _padded(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


def _text(field: torch.Tensor) -> str:
    return bytes(field.tolist()).rstrip(b"\0").decode(errors="replace")
