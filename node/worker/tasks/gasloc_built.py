"""What GASLoC's task in the worker is built of: model, data and method in their places, and what is kept on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from peerloom.node import checkpoint
from peerloom.node.checkpoint_meta import Meta
from peerloom.node.cursor import BatchCursor
from peerloom.node.worker.data import Batches, Shards, check_enough, prepare
from peerloom.node.worker.exchanges import Exchanges, Pieces
from peerloom.node.worker.inner import Inner, InnerLoop
from peerloom.node.worker.memory import BlockLayout, SharedBlock
from peerloom.node.worker.model import build_model, check_digest, init_digest, layout_digest
from peerloom.node.worker.pace import Beneath, Done
from peerloom.node.worker.tasks.common import HELD_OUT, chosen_device
from peerloom.node.worker.tokenizer import load_tokenizer
from peerloom.node.worker_seams import WorkerSetup
from peerloom.optim.flat import FlatParameters, Layout
from peerloom.optim.fragmented import FragmentedGASLoC
from peerloom.optim.projection import project
from peerloom.protocol.errors import RunMismatch, SpecError


@dataclass(slots=True)
class Position:
    """How far this node is. `adopted_at` is the step of the last adoption, while the rate warms up again."""

    round: int = 0
    step: int = 0
    tokens: int = 0
    adam_steps: int = 0
    adopted_at: int | None = None
    held_out_loss: float | None = None


class BuiltGasloc:
    """The parts, as `GaslocTask` finds them; `phases` holds the seconds of each phase of building it."""

    def __init__(
        self,
        setup: WorkerSetup,
        memory_fd: int,
        progress: Callable[[str, float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._setup, self._spec = setup, setup.spec
        self._progress, self._stepped = progress, False
        self._clock = clock
        self._last_batches = 0
        self._done = Done()  # in this round
        self._beneath = Beneath(setup.spec.gasloc)
        self.phases: dict[str, float] = {}
        self._device = self._choose_device()
        since = clock()
        progress("model", 0.0)
        model = build_model(self._spec)
        self._place(model, memory_fd)
        since = self._phase("model", since)
        self._open_data(progress)
        since = self._phase("data", since)
        progress("checkpoint", 0.0)
        self._position = Position()
        self._resumed, notes = self._resume()
        since = self._phase("checkpoint", since)
        progress("evaluation", 0.0)
        if self._position.held_out_loss is None:
            self._position.held_out_loss = self._evaluate()
        self._note = "; ".join(notes)
        self._publish_theta()
        self._phase("evaluation", since)

    def _phase(self, name: str, since: float) -> float:
        now = self._clock()
        self.phases[name] = now - since
        return now

    def _choose_device(self) -> torch.device:
        return chosen_device(self._setup, self._setup.device)

    def _place(self, model: nn.Module, memory_fd: int) -> None:
        """Puts the parameters and GASLoC's buffers where they live: the shared block, or the GPU with copies in it."""
        on_cpu = self._device.type == "cpu"
        host, previous = self._open_block(FlatParameters(model.named_parameters()).numel, memory_fd)
        self._model = model.to(self._device)
        self._flat = FlatParameters(self._model.named_parameters(), host if on_cpu else None)
        flat = self._flat.flat
        live = (self._host_theta, previous) if on_cpu else (torch.empty_like(flat), torch.empty_like(flat))
        self._inner: Inner
        self._inner = self._loop = InnerLoop(self._model, self._spec.train)
        self._open_method(flat, live, self._flat.layout())

    def _open_block(self, numel: int, memory_fd: int) -> tuple[Tensor, Tensor]:
        """Lays out and maps the shared block; the flat parameters and `previous` in it."""
        gasloc = self._spec.gasloc
        self._pieces = Pieces(numel, gasloc)
        own_outbox = gasloc.encoding != "fp32" or gasloc.overlap
        self.layout = BlockLayout(numel, sum(self._pieces.sizes), own_outbox, self._pieces.sizes)
        self._block = SharedBlock(memory_fd, self.layout, create=True)
        self._inbox = torch.frombuffer(self._block.view("inbox"), dtype=torch.uint8)
        self._outbox = torch.frombuffer(self._block.view("outbox"), dtype=torch.uint8)
        self._host_theta, host, previous = (
            torch.frombuffer(self._block.view(name), dtype=torch.float32) for name in ("theta", "params", "previous")
        )
        return host, previous

    def _open_method(self, flat: Tensor, live: tuple[Tensor, Tensor], layout: Layout) -> None:
        """GASLoC over the flat parameters, with `live` (theta, previous) beside them."""
        gasloc, on_cpu, lossy = self._spec.gasloc, flat.device.type == "cpu", self._spec.gasloc.encoding != "fp32"
        y = flat
        if gasloc.overlap:
            y = self._outbox.view(torch.float32) if on_cpu and not lossy else torch.empty_like(flat)
        self._method = FragmentedGASLoC(
            flat,
            gasloc.fragments,
            eta=gasloc.eta,
            alpha=gasloc.alpha,
            gamma=gasloc.gamma,
            momentum=gasloc.momentum,
            buffers=live,
            y=y if gasloc.overlap else None,
        )
        itself = on_cpu and not lossy  # the outbox is where y is
        outbox = None if itself else self._outbox
        self._exchanges = Exchanges(self._method, self._spec, self._setup.peer_id, self._pieces, y, self._inbox, outbox)
        self._init_digest = init_digest(flat)
        check_digest(self._spec, self._init_digest)
        self._layout_digest = layout_digest(layout)

    def _seed(self, value: int) -> None:
        torch.manual_seed(value)

    def _collect(self) -> None:
        """Brings the parameters into the flat tensor that GASLoC works on; where they are its views, they are there."""

    def _spread(self) -> None:
        """The other way round."""

    def _open_data(self, progress: Callable[[str, float], None]) -> None:
        data, train = self._spec.data, self._spec.train
        if self._setup.data_source:
            data = replace(data, source=self._setup.data_source)
        tokenizer = load_tokenizer(data.tokenizer)
        vocabulary = getattr(self._model.config, "vocab_size", None)
        if isinstance(vocabulary, int) and tokenizer.vocab_size > vocabulary:
            raise SpecError(
                [f"model.vocab_size: {vocabulary} is less than the tokenizer's {tokenizer.vocab_size}; raise it"]
            )
        shards: Shards = prepare(data, tokenizer, self._setup.cache_dir, progress)
        check_enough(shards, data, train.batch_size)
        size = (train.batch_size, data.sequence_length)
        self._batches = Batches(shards.train, self._spec.seed, self._setup.peer_id, *size)
        held_out = Batches(shards.held_out, self._spec.seed, HELD_OUT, *size)
        self._held_out = [torch.from_numpy(held_out[index]) for index in range(train.eval_batches)]

    def _resume(self) -> tuple[bool, list[str]]:
        """Takes up the newest intact checkpoint, if any; returns whether it did, and what was wrong on the disk."""
        checkpoint.clear_leftovers(self._folder)
        found, notes = self._newest()
        self._cursor = BatchCursor(self._setup.run_dir / "batch.cursor", found.meta.batch_cursor if found else None)
        if self._cursor.note:
            notes.append(self._cursor.note)
        if found is None:
            return False, notes
        meta = found.meta
        if (meta.spec_hash, meta.layout_digest) != (self._spec.spec_hash(), self._layout_digest):
            raise RunMismatch(f"the checkpoints in {self._folder} belong to another run or model; move them away")
        state = {"theta": found.theta, "previous": found.previous, "momentum": self._spec.gasloc.momentum}
        self._method.load_state_dict(state if found.params is None else {**state, "params": found.params})
        self._spread()
        self._exchanges.remember(meta.distances)
        self._load_moments(found)
        self._position = Position(
            meta.round, meta.step, meta.tokens, meta.adam_steps, meta.adopted_at, meta.held_out_loss
        )
        return True, notes

    @property
    def _folder(self) -> Path:
        return self._setup.run_dir / "checkpoints"

    def _newest(self) -> tuple[checkpoint.Checkpoint | None, list[str]]:
        return checkpoint.newest_intact(self._folder, fits=self._take_moments)

    def _take_moments(self, found: checkpoint.Checkpoint) -> None:
        """Raises ValueError for those that do not fit; another run's are for _resume() to refuse."""
        if found.meta.spec_hash == self._spec.spec_hash():
            self._loop.load_state(found.optimizer)

    def _load_moments(self, found: checkpoint.Checkpoint) -> None:
        """They were taken up when the checkpoint was found to fit."""

    def _write(self, meta: Meta) -> Path:
        state = self._method.state_dict()
        return checkpoint.save(
            self._folder,
            checkpoint.Checkpoint(
                meta=meta,
                theta=state["theta"].cpu(),
                previous=state["previous"].cpu(),
                optimizer=self._loop.state(),
                params=state["params"].cpu() if "params" in state else None,
            ),
            keep=self._setup.keep_checkpoints,
        )

    def _evaluate(self) -> float:
        return self._inner.evaluate(self._held_out)

    def _sketch(self) -> tuple[float, ...]:
        """theta's projection, the same for all nodes of the run; to seven digits, which is what fp32 holds."""
        return tuple(float(f"{value:.7g}") for value in self._projected().tolist())

    def _projected(self) -> Tensor:
        return project(self._method.theta, self._spec.seed)

    def _publish_theta(self, fragment: int | None = None) -> None:
        """Shows the daemon the round's start point, whole or a fragment's; on the CPU theta lives there already."""
        if self._device.type != "cpu":
            span = slice(None) if fragment is None else self._method.slices[fragment]
            self._host_theta[span].copy_(self._method.theta[span])
