"""SOAP's order of operations (arXiv 2409.11321) around the same rotated Adam: the basis lags its gradient by a step."""

from __future__ import annotations

from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.eigenbasis import Rotation
from peerloom.optim.rotated_stack import RotatedStack, rotated_direction, update_covariances


class SoapStack(RotatedStack):
    """The first step only finds the basis, and is not counted among those of moments and refreshes, as in the authors'
    code; later ones update the weights first, then covariances and basis."""

    def step(self) -> None:
        gradient = self.begin()
        tensors, setting, taken = self.tensors, self.setting, self.count - 1
        if taken:
            rotation = Rotation(tensors.get("left"), tensors.get("right"))
            self.apply(
                rotated_direction(
                    gradient, rotation, tensors["exp_avg"], tensors["exp_avg_sq"], setting.beta1, setting.beta2,
                    setting.eps,
                ),
                taken,
            )  # fmt: skip
        update_covariances(gradient, tensors.get("left_cov"), tensors.get("right_cov"), setting.beta2)
        if taken % setting.freq == 0:
            self.refresh(gradient)


class SoapForm(BasisRotatedAdam):
    """BasisRotatedAdam's parameters and groups, SOAP's step."""

    stack_type = SoapStack
