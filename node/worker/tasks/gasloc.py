"""GASLoC in the worker: local steps, the proposal, the mix, evaluation, checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peerloom.node.checkpoint_meta import Meta
from peerloom.node.worker import messages
from peerloom.node.worker.between import Between
from peerloom.node.worker.pace import Done, another_step, reservations
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker.tasks.common import NonFiniteLoss, library_versions
from peerloom.node.worker.tasks.gasloc_built import BuiltGasloc
from peerloom.node.worker_seams import FIRST_STEP, RoundFinished, RoundTrained, Taken, WorkerReady
from peerloom.optim.eigenbasis import NonFiniteGradient
from peerloom.protocol.types import Span


class GaslocTask(BuiltGasloc):
    """One node's training, driven call by call; `phases` holds the seconds of each phase of building it.

    Raises DataError, SpecError, ConfigError (device), StorageError, RunMismatch.
    """

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
            case messages.Train(number, round, fragment, linger_s):
                return self.train(round, lambda: between.interrupted(number), fragment, between.wait, linger_s)
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
        """The local steps up to a fragment's exchange, at least one a round; `interrupted` is asked after each.

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
        if fragment == 0:
            self._done = Done()
            self._method.start_round()
        spec, before = self._spec.gasloc, self._done
        sizes, first = reservations(spec, self._last_batches, fragment), self._cursor.next
        if another_step(0, 0.0, spec, fragment, linger_s, before):
            self._cursor.reserve(next(sizes))
        started = self._clock()
        self._seed(self._dropout_seed(first))
        losses: list[Tensor] = []
        under_way = self.exchanging
        while True:
            if under_way and not (self.exchanging and self._beneath.goes_on(len(losses), self._clock() - started)):
                started += self._land(len(losses), self._clock() - started, wait)
                under_way = False
            more = another_step(len(losses), self._clock() - started, spec, fragment, linger_s, before)
            if not (more or (under_way and spec.round_s)):
                break
            if first + len(losses) == self._cursor.next:
                self._cursor.reserve(next(sizes))
            losses.append(self._step(first + len(losses)))
            self._tell_first_step()
            if spec.round_s:
                self._wait_for(losses[-2:][0])
            if interrupted():
                break
        self._cursor.give_back(first + len(losses))
        if under_way:
            started += self._land(len(losses), self._clock() - started, wait)
        seconds = self._clock() - started
        self._last_batches, self._done = len(losses), before.plus(len(losses), seconds)
        told = torch.stack(losses) if losses else torch.zeros(1)
        self._propose(told)
        return RoundTrained(
            round=round,
            step=at.step,
            tokens=at.tokens,
            first_batch=first,
            batches=len(losses),
            seconds=seconds,
            train_loss=float(told.mean()),
        )

    def _land(self, done: int, elapsed_s: float, wait: Callable[[], None]) -> float:
        """Waits for the exchange that so many steps ran beneath, if it is not over yet; returns the seconds it took."""
        self._beneath.over(done, elapsed_s)
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
            round=at.round,
            held_out_loss=at.held_out_loss,
            sketch=self._sketch(),
            beneath_s=self._beneath.finished(),
            **mixed._asdict(),
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
        meta = Meta(
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
