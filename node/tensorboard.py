"""`--tensorboard DIR`: what the journal says of each round, as TensorBoard's event files."""

from __future__ import annotations

import math
from pathlib import Path

from peerloom.node.durable import storage_errors
from peerloom.node.journal import Value
from peerloom.protocol.errors import ConfigError

TAGS = {
    "held_out_loss": "loss/held_out",
    "train_loss": "loss/train",
    "tokens": "progress/tokens",
    "train_s": "seconds/local_steps",
    "exchange_s": "seconds/exchange",
    "share": "exchange/share_of_partner",
}


class TensorBoard:
    """Writes one event file below `folder`; raises ConfigError without the package, StorageError without the disk."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(
                "--tensorboard needs the package tensorboardX: pip install 'peerloom[tensorboard]', or leave it out"
            ) from None
        with storage_errors(f"TensorBoard's event files in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(str(folder), flush_secs=10)

    def take(self, kind: str, values: dict[str, Value]) -> None:
        """Takes a line of the journal; its step is the optimizer's."""
        step = values.get("step")
        if kind != "round" or not isinstance(step, int):
            return
        for name, tag in TAGS.items():
            value = values.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
