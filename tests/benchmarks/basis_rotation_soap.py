"""SOAP's order of operations (arXiv 2409.11321) around the same rotated Adam: the basis lags its gradient by a step."""

from __future__ import annotations

from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.eigenbasis import Rotation
from peerloom.optim.rotated_stack import RotatedStack, rotated_direction, update_covariances


class SoapStack(RotatedStack):
    """The first step only finds the basis; later ones update the weights first, then covariances and basis."""

    def step(self) -> None:
        gradient = self.begin()
        tensors, setting = self.tensors, self.setting
        if self.count > 1:
            rotation = Rotation(tensors.get("left"), tensors.get("right"))
            self.apply(
                rotated_direction(
                    gradient, rotation, tensors["exp_avg"], tensors["exp_avg_sq"], setting.beta1, setting.beta2,
                    setting.eps,
                )
            )  # fmt: skip
        update_covariances(gradient, tensors.get("left_cov"), tensors.get("right_cov"), setting.beta2)
        if self.count == 1 or self.count % setting.freq == 0:
            self.refresh(gradient)


class SoapForm(BasisRotatedAdam):
    """BasisRotatedAdam's parameters and groups, SOAP's step."""

    stack_type = SoapStack
