"""GASLoC in the worker: local steps, the proposal, the mix, evaluation, checkpoints."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from peerloom.node import checkpoint
from peerloom.node.cursor import BatchCursor
from peerloom.node.seams import FIRST_STEP, RoundFinished, RoundTrained, Taken, WorkerReady, WorkerSetup
from peerloom.node.worker import messages
from peerloom.node.worker.between import Between
from peerloom.node.worker.data import Batches, Shards, check_enough, prepare
from peerloom.node.worker.exchanges import Exchanges, Pieces
from peerloom.node.worker.inner import Inner, InnerLoop
from peerloom.node.worker.memory import BlockLayout, SharedBlock
from peerloom.node.worker.model import build_model, check_digest, init_digest, layout_digest
from peerloom.node.worker.pace import another_step, may_go_on, reservations
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker.tasks.common import HELD_OUT, NonFiniteLoss, chosen_device, library_versions
from peerloom.node.worker.tokenizer import load_tokenizer
from peerloom.optim.eigenbasis import NonFiniteGradient
from peerloom.optim.flat import FlatParameters, Layout
from peerloom.optim.fragmented import FragmentedGASLoC
from peerloom.optim.projection import project
from peerloom.protocol.errors import RunMismatch, SpecError
from peerloom.protocol.types import Span


@dataclass(slots=True)
class _Position:
    """How far this node is. `adopted_at` is the step of the last adoption, while the rate warms up again."""

    round: int = 0
    step: int = 0
    tokens: int = 0
    adam_steps: int = 0
    adopted_at: int | None = None
    held_out_loss: float | None = None


class GaslocTask:
    """One node's training, driven call by call; `phases` holds the seconds of each phase of building it.

    Raises DataError, SpecError, ConfigError (device), StorageError, RunMismatch.
    """

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
        self._position = _Position()
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
        self._position = _Position(
            meta.round, meta.step, meta.tokens, meta.adam_steps, meta.adopted_at, meta.held_out_loss
        )
        return True, notes

    @property
    def _folder(self) -> Path:
        return self._setup.run_dir / "checkpoints"

    def ready(self) -> WorkerReady:
        """What start() answers."""
        at = self._position
        return WorkerReady(
            init_digest=self._init_digest,
            layout_digest=self._layout_digest,
            numel=self.layout.numel,
            payload_bytes=self.layout.payload_bytes,
            round=at.round,
            step=at.step,
            tokens=at.tokens,
            held_out_loss=at.held_out_loss,
            resumed=self._resumed,
            note=self._note,
            sketch=self._sketch(),
            piece_bytes=self.layout.piece_bytes,
        )

    @property
    def exchanging(self) -> bool:
        """Whether the exchange of a round is under way beneath the local steps of the next."""
        return self._spec.gasloc.overlap and self._exchanges.open

    def obey(self, command: messages.Command, between: Between) -> object:
        """Carries out one command; `between` is called between local steps."""
        match command:
            case messages.Train(round, fragment, linger_s):
                return self.train(round, lambda: between.interrupted(round), fragment, between.wait, linger_s)
            case messages.Take(fragment, weight, pieces, replace):
                return self.take(fragment, weight, pieces, replace)
            case messages.Settle(fragment):
                return self.settle(fragment)
            case messages.Finish(mix):
                return self.finish(mix)
            case messages.Adopt(round, step):
                return self.adopt(round, step)
            case messages.Save():
                return self.save()
        raise RuntimeError(f"no command of GASLoC: {command}")

    def train(
        self,
        round: int,
        interrupted: Callable[[], bool],
        fragment: int = 0,
        wait: Callable[[], None] = lambda: None,
        linger_s: float = 0.0,
    ) -> RoundTrained:
        """The local steps up to a fragment's exchange, at least one; `interrupted` is asked after each.

        The fragment's y is in the outbox after it. With overlap the exchange before may be under way, and is waited for
        after some steps: `wait` is called until one of its calls, or of `interrupted`, has led to finish(). Raises
        NonFiniteLoss, StorageError (the batch cursor), ValueError for a round or fragment that is not the next.
        """
        at = self._position
        following = at.round + self.exchanging
        if round != following:
            raise ValueError(f"asked to train round {round} while round {following} is next")
        if fragment != self._exchanges.fragment:
            raise ValueError(f"asked to train fragment {fragment} while fragment {self._exchanges.fragment} is next")
        spec = self._spec.gasloc
        sizes = reservations(spec, self._last_batches, fragment)
        first = self._cursor.reserve(next(sizes))
        started = self._clock()
        if fragment == 0:
            self._method.start_round()
        self._seed(self._dropout_seed(first))
        losses: list[Tensor] = []
        while another_step(len(losses), self._clock() - started, spec, fragment, linger_s):
            if not may_go_on(len(losses), self._clock() - started, spec):
                started += self._until_finished(wait)
            if first + len(losses) == self._cursor.next:
                self._cursor.reserve(next(sizes))
            losses.append(self._step(first + len(losses)))
            self._tell_first_step()
            if spec.round_s:
                self._wait_for(losses[-2:][0])
            if interrupted():
                break
        self._cursor.give_back(first + len(losses))
        started += self._until_finished(wait)
        seconds = self._clock() - started
        self._last_batches = len(losses)
        self._propose(torch.stack(losses))
        return RoundTrained(
            round=round,
            step=at.step,
            tokens=at.tokens,
            first_batch=first,
            batches=len(losses),
            seconds=seconds,
            train_loss=float(torch.stack(losses).mean()),
        )

    def _until_finished(self, wait: Callable[[], None]) -> float:
        """Waits for the end of the exchange under way, if there is one; returns the seconds it took."""
        since = self._clock()
        while self.exchanging:
            wait()
        return self._clock() - since

    def _step(self, index: int) -> Tensor:
        at = self._position
        rate = learning_rate(at.step, self._spec.train, adopted_at=at.adopted_at)
        try:
            loss = self._inner.step(torch.from_numpy(self._batches[index]), rate)
        except NonFiniteGradient as error:
            raise NonFiniteLoss(self._diverged("a gradient")) from error
        at.step += 1
        at.adam_steps += 1
        at.tokens += self._spec.train.batch_size * self._spec.data.sequence_length
        return loss

    def _wait_for(self, loss: Tensor) -> None:
        """On a GPU, steps are only queued: the clock means something once one has ended, the last but one at best."""
        if self._device.type == "cuda":
            loss.item()

    def _tell_first_step(self) -> None:
        if not self._stepped:
            self._stepped = True
            self._progress(FIRST_STEP, 1.0)

    def _propose(self, losses: Tensor) -> None:
        self._collect()
        y = self._exchanges.propose()
        if self._spec.gasloc.overlap:
            self._spread()  # local steps go on from y
        if not (bool(losses.isfinite().all()) and bool(y.sum().isfinite())):
            raise NonFiniteLoss(self._diverged("the loss or a parameter"))
        self._exchanges.send(self._position.round)

    def _diverged(self, what: str) -> str:
        at = self._position
        return (
            f"training diverged in round {at.round} (step {at.step}): {what} is not finite; "
            "lower train.learning_rate if it happens again"
        )

    def _dropout_seed(self, first_batch: int) -> int:
        """A resumed node drops what it would have dropped; matters only for models with dropout."""
        text = f"{self._spec.seed}\0{self._setup.peer_id}\0{first_batch}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def take(self, fragment: int, weight: float, pieces: Span, replace: bool) -> Taken:
        """Takes in these pieces of the inbox, at that weight unless cut; in a group, the outbox has the outcome."""
        return Taken(**self._exchanges.take(weight, pieces, replace)._asdict())

    def settle(self, fragment: int) -> Taken:
        """Ends the exchanges of a fragment before the last."""
        mixed = self._exchanges.settle()
        self._spread()
        self._publish_theta(fragment)
        return Taken(**mixed._asdict())

    def finish(self, mix: bool) -> RoundFinished:
        """Mixes with the inbox if `mix`, at weight 1 unless it is cut; theta of the next round stands after it.

        With overlap, what is evaluated is theta with the local steps taken since, if any. Fragments whose turn has not
        come are proposed to nobody.
        """
        if self._spec.gasloc.overlap:
            self._collect()  # local steps went on; elsewhere the flat tensor holds y
        mixed = self._exchanges.finish(mix)
        self._spread()
        at = self._position
        at.round += 1
        if at.adopted_at is not None and at.adam_steps >= self._spec.train.warmup_steps:
            at.adopted_at = None
        self._publish_theta()
        due = at.round % self._spec.train.eval_every_rounds == 0
        at.held_out_loss = self._evaluate() if due else None
        return RoundFinished(
            round=at.round, held_out_loss=at.held_out_loss, sketch=self._sketch(), **mixed._asdict()
        )

    def adopt(self, round: int, step: int) -> RoundFinished:
        """Takes the donor's state from the theta region: y_prev = theta, fresh moments, a short new warm-up."""
        self._method.adopt(self._host_theta.clone())
        self._spread()
        self._inner.reset()
        at = self._position
        at.round, at.step, at.adam_steps, at.adopted_at = round, step, 0, step
        self._exchanges.reset()
        self._publish_theta()
        at.held_out_loss = self._evaluate()
        return RoundFinished(round=round, held_out_loss=at.held_out_loss, sketch=self._sketch())

    def save(self) -> Path:
        """Writes a checkpoint of the state between two rounds; raises StorageError, RuntimeError amid a round."""
        if self._exchanges.open or self._exchanges.fragment:
            raise RuntimeError("a checkpoint holds a finished round: call finish() before save()")
        at = self._position
        meta = checkpoint.Meta(
            round=at.round,
            step=at.step,
            tokens=at.tokens,
            batch_cursor=self._cursor.next,
            spec_hash=self._spec.spec_hash(),
            layout_digest=self._layout_digest,
            adam_steps=at.adam_steps,
            adopted_at=at.adopted_at,
            held_out_loss=at.held_out_loss,
            distances=self._exchanges.distances(),
            versions=library_versions(),
        )
        return self._write(meta)

    def _newest(self) -> tuple[checkpoint.Checkpoint | None, list[str]]:
        return checkpoint.newest_intact(self._folder)

    def _load_moments(self, found: checkpoint.Checkpoint) -> None:
        self._loop.load_state(found.optimizer)

    def _write(self, meta: checkpoint.Meta) -> Path:
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
