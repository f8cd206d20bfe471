"""The flat vector in F contiguous parts, exchanged one after the other over a round, so that peak traffic falls F-fold.

Streaming DiLoCo (arXiv 2501.18512) does the same for DiLoCo. Each fragment has rounds of its own, H local steps long,
shifted against the next one's by H / F: a fragment is a `GASLoC` of its own over `params[fragment]`.
"""

from __future__ import annotations

ALIGNMENT = 256  # elements, so that no int8 block and no vector instruction straddles two fragments


def fragments(numel: int, count: int, alignment: int = ALIGNMENT) -> list[slice]:
    """`count` contiguous slices that cover [0, numel), starts multiples of `alignment`, sizes apart by at most that.

    The last one's end is numel itself. Raises ValueError where there are fewer aligned places than fragments.
    """
    if count < 1 or alignment < 1:
        raise ValueError(f"fragments and alignment must be at least 1, got {count} and {alignment}")
    units = -(-numel // alignment)
    if count > max(units, 1):
        raise ValueError(f"{numel} parameters make at most {max(units, 1)} fragments of {alignment}, not {count}")
    bounds = [min(numel, units * k // count * alignment) for k in range(count + 1)]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def due_after(step: int, local_steps: int, count: int) -> list[int]:
    """The fragments to exchange after local step `step` (counted from 1), in order.

    Fragment f is due whenever step = ceil((f + 1) H / F) modulo H: the last of them at the end of a round, so that one
    fragment is the plain method. With F > H several share a step.
    """
    if local_steps < 1 or count < 1:
        raise ValueError(f"local_steps and fragments must be at least 1, got {local_steps} and {count}")
    return [f for f in range(count) if step >= 1 and (step - offset(f, local_steps, count)) % local_steps == 0]


def offset(fragment: int, local_steps: int, count: int) -> int:
    """The local step of a round, 1 to H, after which the fragment is exchanged: ceil((fragment + 1) H / F)."""
    return -(-(fragment + 1) * local_steps // count)


def own_round(step: int, local_steps: int, count: int, fragment: int) -> int:
    """How many exchanges of this fragment were due before those of `step`: its round, counted from 0.

    A sequence of graphs or groups that repeats is to be indexed with own_round + fragment. A counter over all exchanges
    would meet each fragment at the same place of the sequence whenever the period divides `count`: with 4 fragments and
    groups of 4 on 16 nodes, whose period is 2, no fragment would ever leave its half of the hypercube.
    """
    return (step - 1 + local_steps - offset(fragment, local_steps, count)) // local_steps
