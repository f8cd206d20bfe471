"""The versions of a stage's weights that its microbatches are computed with."""

from __future__ import annotations

from torch import Tensor, nn


class StageWeights:
    """The newest weights are the module's own; with `keep`, older ones are copies until `drop`.

    Without it every forward pass takes the newest, and its backward pass what they have become by then: the gradient
    of no function, as in a pipeline without stash.
    """

    def __init__(self, module: nn.Module, version: int, *, keep: bool, alias: bool = False) -> None:
        self._named = list(module.named_parameters())
        self._keep, self._alias = keep, alias
        self.newest = version
        self._copies: dict[int, list[Tensor]] = {}
        if keep:
            self._copies[version] = self._copy()

    def of(self, version: int) -> tuple[dict[str, Tensor] | None, list[Tensor]]:
        """What to compute with: tensors by name, None for the module as it is, and the leaves in order.

        Raises KeyError for a version that is not kept.
        """
        if self._alias:  # the same memory past autograd's version counter, which would refuse the backward pass
            leaves = [parameter.data.requires_grad_() for _, parameter in self._named]
        elif self._keep:
            leaves = self._copies[version]
        elif version == self.newest:
            return None, [parameter for _, parameter in self._named]
        else:
            raise KeyError(version)
        return {name: leaf for (name, _), leaf in zip(self._named, leaves, strict=True)}, leaves

    def updated(self, oldest: int) -> None:
        """The module holds the next version now, and none below `oldest` is asked for any more."""
        self.newest += 1
        if self._keep:
            self._copies[self.newest] = self._copy()
            for version in [version for version in self._copies if version < oldest]:
                del self._copies[version]

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone().requires_grad_() for _, parameter in self._named]
