"""A pipeline's stage in the worker: forward, backward and update of one part of the model, and its checkpoints.

Activations and gradients come in the inbox and leave in the outbox, one at a time, in the run's encoding.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from peerloom.node import checkpoint
from peerloom.node.checkpoint_meta import Meta
from peerloom.node.worker import messages
from peerloom.node.worker.between import Between
from peerloom.node.worker.data import Batches, check_enough, content_digest, prepare
from peerloom.node.worker.exchanges import Pieces
from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.memory import BlockLayout, SharedBlock
from peerloom.node.worker.model import init_digest, layout_digest
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker.stage_costs import stage_train
from peerloom.node.worker.stage_memory import stage_memory
from peerloom.node.worker.stage_model import build_stage
from peerloom.node.worker.stage_replica import StageReplica
from peerloom.node.worker.stage_weights import StageWeights
from peerloom.node.worker.tasks.common import HELD_OUT, NonFiniteLoss, chosen_device, library_versions
from peerloom.node.worker.tokenizer import load_tokenizer
from peerloom.node.worker_seams import FIRST_STEP, WorkerReady, WorkerSetup
from peerloom.optim.eigenbasis import NonFiniteGradient
from peerloom.optim.flat import FlatParameters
from peerloom.protocol.errors import ConfigError, RunMismatch, SpecError
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.replicas import replica_spec

MEMORY_SHARE = 0.9  # of what is free
KEPT_LANES = 64
QUARTER = 16  # hex digits of the init digest for theta_0, as many for the cut of all stages, and twice for the text


@dataclass(slots=True)
class _Pass:
    """A forward pass whose backward pass is to come."""

    given: Tensor
    made: Tensor
    leaves: list[Tensor]
    update: int | None


class StageTask:
    """One stage's training, driven command by command; `phases` holds the seconds of each phase of building it.

    Raises DataError, SpecError, ConfigError (device, or too little memory), StorageError, RunMismatch.
    """

    def __init__(self, setup: WorkerSetup, memory_fd: int, progress: Callable[[str, float], None]) -> None:
        spec = setup.spec
        self._setup, self._spec, self._progress = setup, spec, progress
        self._stage, self._stages = setup.stage, spec.pipeline.stages
        self._first, self._last = setup.stage == 0, setup.stage == spec.pipeline.stages - 1
        self._wire = torch.bfloat16 if spec.pipeline.encoding == "bf16" else torch.float32
        self._rows = spec.train.batch_size // spec.pipeline.microbatches
        self._device = chosen_device(setup, setup.device)
        self.phases: dict[str, float] = {}
        began = time.perf_counter()
        progress("model", 0.0)
        self._refuse_too_large()
        self._model = build_stage(spec, setup.stage).to(self._device)
        self._flat = FlatParameters(self._model.named_in_whole())
        self._width = self._model.config.hidden_size
        self._init_digest = init_digest(self._flat.flat)[:QUARTER] + cut_digest(self._model.spans)[:QUARTER]
        self._layout = layout_digest(self._flat.layout())
        self._inner = InnerLoop(self._model, stage_train(spec, setup.stage))
        began = self._phase("model", began)
        self._open_data(progress)
        began = self._phase("data", began)
        progress("checkpoint", 0.0)
        self._held_out_loss: float | None = None
        self._resumed, self._state, self._note = self._resume()
        self._weights = self._versions_from(self._version)
        self._passes: dict[Microbatch, _Pass] = {}
        self._sums: dict[int, list[Tensor]] = {}
        self._lanes: dict[int, Batches] = {}
        self._place(memory_fd)
        self._phase("checkpoint", began)

    def _phase(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self.phases[name] = now - began
        return now

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self._rows, self._spec.data.sequence_length, self._width

    def _versions_from(self, version: int) -> StageWeights:
        pipeline = self._spec.pipeline
        lag = pipeline.lag(self._stage)
        keep = pipeline.stash and lag > 0
        return StageWeights(self._model, version, keep=keep, alias=not pipeline.stash and lag > 0)

    def _refuse_too_large(self) -> None:
        """Raises ConfigError when what training and sharing the stage hold does not fit."""
        memory = stage_memory(self._spec, self._stage, on_cpu=self._device.type == "cpu")
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
        else:
            free = psutil.virtual_memory().available
        if memory.total > MEMORY_SHARE * free:
            raise ConfigError(
                f"stage {self._stage} takes {memory.total / 1e9:.1f} GB with {memory.versions} versions of its weights "
                f"and {(memory.total - memory.training) / 1e9:.1f} GB for sharing it with another host, and "
                f"{free / 1e9:.1f} GB are free on {self._device}; free memory, or raise pipeline.stages in the run"
            )

    def _open_data(self, progress: Callable[[str, float], None]) -> None:
        """First and last stage draw their own tokens; those between need none."""
        if not (self._first or self._last):
            return
        data, train = self._spec.data, self._spec.train
        if self._setup.data_source:
            data = replace(data, source=self._setup.data_source)
        tokenizer = load_tokenizer(data.tokenizer)
        if tokenizer.vocab_size > self._model.config.vocab_size:
            vocabulary = self._model.config.vocab_size
            raise SpecError(
                [f"model.vocab_size: {vocabulary} is less than the tokenizer's {tokenizer.vocab_size}; raise it"]
            )
        self._shards = prepare(data, tokenizer, self._setup.cache_dir, progress)
        check_enough(self._shards, data, train.batch_size)
        self._init_digest += content_digest(data, tokenizer, self._setup.cache_dir)[: 2 * QUARTER]
        size = (train.batch_size, data.sequence_length)
        self._held_out = Batches(self._shards.held_out, self._spec.seed, HELD_OUT, *size)

    def _place(self, memory_fd: int) -> None:
        rows, length, width = self._shape
        slot = rows * length * width * self._wire.itemsize
        spec, flat = replica_spec(self._spec), self._flat.flat
        pieces = Pieces(flat.numel(), spec.gasloc)
        self.layout = BlockLayout(0, slot, True, replica_bytes=sum(pieces.sizes))
        self._block = SharedBlock(memory_fd, self.layout, create=True)
        self._inbox = torch.frombuffer(self._block.view("inbox"), dtype=self._wire).view(self._shape)
        self._outbox = torch.frombuffer(self._block.view("outbox"), dtype=self._wire).view(self._shape)
        boxes = [torch.frombuffer(self._block.view(name), dtype=torch.uint8) for name in ("proposal", "partner")]
        self._replica = StageReplica(flat, spec, self._setup.peer_id, pieces, *boxes)

    # checkpoints

    @property
    def _folder(self) -> Path:
        return checkpoint.stage_folder(self._setup.run_dir, self._stage)

    def _resume(self) -> tuple[bool, dict[str, object], str]:
        """Takes up the newest intact checkpoint of this stage, if any."""
        self._version = self._tokens = 0
        checkpoint.clear_leftovers(self._folder)
        found, notes = checkpoint.newest_intact(self._folder, fits=self._take_moments)
        if found is None:
            return False, {}, "; ".join(notes)
        meta = found.meta
        self._flat.copy_in(found.theta)
        self._version, self._tokens, self._held_out_loss = meta.step, meta.tokens, meta.held_out_loss
        return True, dict(meta.pipeline or {}), "; ".join(notes)

    def _take_moments(self, found: checkpoint.Checkpoint) -> None:
        """Takes the optimizer's state of a checkpoint that fits this stage; raises ValueError for another, RunMismatch.

        It may be a copy that a peer handed over.
        """
        if found.meta.spec_hash != self._spec.spec_hash():
            raise RunMismatch(f"the checkpoints in {self._folder} belong to another run; move them away")
        if found.meta.layout_digest != self._layout or found.theta.shape != (self._flat.numel,):
            raise ValueError("it is of another model or stage")
        try:
            self._inner.load_state(found.optimizer)
        except (ValueError, KeyError, IndexError, RuntimeError) as error:
            self._inner.reset()
            raise ValueError(f"its optimizer's state does not fit: {error}") from error

    def ready(self) -> WorkerReady:
        """What start() answers."""
        return WorkerReady(
            init_digest=self._init_digest,
            layout_digest=self._layout,
            numel=self._flat.numel,
            payload_bytes=self.layout.payload_bytes,
            replica_bytes=self.layout.replica_bytes,
            round=self._version,
            step=self._version,
            tokens=self._tokens,
            held_out_loss=self._held_out_loss,
            resumed=self._resumed,
            note=self._note,
            pipeline=self._state or None,
        )

    exchanging = False

    def obey(self, command: messages.Command, between: Between) -> object:
        """Carries out one command of a stage."""
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = None
        match command:
            case messages.Forward(microbatch, version, update):
                loss = self.forward(microbatch, version, update)
            case messages.Backward(microbatch):
                self.backward(microbatch)
            case messages.Update(update, oldest):
                self.update(update, oldest)
            case messages.Mixing(step, round):
                return self._replica.take(step, round)
            case messages.SaveStage(ledger, lane):
                return self.save(ledger, lane)
            case _:
                raise RuntimeError(f"a stage knows no {command}")
        return messages.Ran(time.perf_counter() - began, loss, time.process_time() - cpu_began)

    # the passes

    def forward(self, microbatch: Microbatch, version: int, update: int | None) -> float | None:
        """From the inbox, or on the first stage from its data, to the outbox; the last stage does all and has a loss.

        Raises KeyError for a version that is not kept, NonFiniteLoss.
        """
        if microbatch.held_out:
            return self._evaluate(microbatch)
        named, leaves = self._weights.of(version if update is not None else self._weights.newest)
        given = self._given(microbatch)
        self._model.train()
        made = self._run(given, named)
        if self._last:
            loss = self._loss(made, microbatch)
            self._backward(_Pass(given, loss, leaves, update), None)
            return self._finite(loss)
        self._passes[microbatch] = _Pass(given, made, leaves, update)
        self._give(made)
        return None

    def backward(self, microbatch: Microbatch) -> None:
        """From the gradient in the inbox to the gradient of what the stage was given, in the outbox.

        Raises NonFiniteLoss.
        """
        gradient = self._inbox.to(self._device).float()
        if self._first and not bool(gradient.sum().isfinite()):  # elsewhere what is given on would show it
            raise NonFiniteLoss(self._diverged("a gradient"))
        self._backward(self._passes.pop(microbatch), gradient)

    def _backward(self, done: _Pass, gradient: Tensor | None) -> None:
        inputs = [] if self._first else [done.given]
        wanted = [*inputs, *(done.leaves if done.update is not None else ())]
        if not wanted:
            return  # computed again for the sake of those before, and none are
        grads = list(torch.autograd.grad(done.made, wanted, gradient))
        if inputs:
            self._give(grads.pop(0))
        if done.update is None:
            return
        sums = self._sums.get(done.update)
        if sums is None:
            self._sums[done.update] = grads
        else:
            for total, grad in zip(sums, grads, strict=True):
                total.add_(grad)

    def update(self, update: int, oldest: int) -> None:
        """Trains the newest weights with the mean gradient of an update's microbatches; raises NonFiniteLoss."""
        if update != self._weights.newest:
            raise ValueError(f"asked for update {update} while {self._weights.newest} is next")
        parts = self._spec.pipeline.microbatches
        for (_, parameter), grad in zip(self._model.named_parameters(), self._sums.pop(update), strict=True):
            parameter.grad = grad if parts == 1 else grad.div_(parts)
        try:
            self._inner.update(learning_rate(update, self._spec.train))
        except NonFiniteGradient as error:
            raise NonFiniteLoss(self._diverged("a gradient")) from error
        self._weights.updated(oldest)
        if self._first:
            self._tokens += self._spec.train.batch_size * self._spec.data.sequence_length
        if self._progress is not None and update == self._version:
            self._progress(FIRST_STEP, 1.0)

    def save(self, ledger: dict[int, tuple[int, list[int]]], lane: int) -> Path:
        """Writes a checkpoint of the newest weights; raises StorageError."""
        version = self._weights.newest
        lanes = [[number, below, ahead] for number, (below, ahead) in ledger.items()]
        meta = Meta(
            round=version,
            step=version,
            tokens=self._tokens,
            batch_cursor=0,
            spec_hash=self._spec.spec_hash(),
            layout_digest=self._layout,
            adam_steps=version,
            held_out_loss=self._held_out_loss,
            versions=library_versions(),
            pipeline={"stage": self._stage, "lane": lane, "ledger": lanes},
        )
        state = checkpoint.Checkpoint(
            meta=meta,
            theta=self._flat.flat.detach().cpu(),
            previous=torch.empty(0),
            optimizer=self._inner.state(),
        )
        return checkpoint.save(self._folder, state, keep=self._setup.keep_checkpoints)

    def _run(self, given: Tensor, named: dict[str, Tensor] | None) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
            made: Tensor = self._model(given) if named is None else functional_call(self._model, named, (given,))
        return made

    def _loss(self, logits: Tensor, microbatch: Microbatch) -> Tensor:
        labels = self._tokens_of(microbatch)[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), labels)

    def _evaluate(self, microbatch: Microbatch) -> float | None:
        self._model.eval()
        with torch.no_grad():
            made = self._run(self._given(microbatch), None)
            if self._last:
                return self._finite(self._loss(made, microbatch))
            self._give(made)
        return None

    def _given(self, microbatch: Microbatch) -> Tensor:
        if self._first:
            return self._tokens_of(microbatch)[:, :-1]
        given = self._inbox.to(self._device).float()
        if given.data_ptr() == self._inbox.data_ptr():
            given = given.clone()  # the inbox is the next one's soon
        return given if microbatch.held_out else given.requires_grad_()

    def _give(self, made: Tensor) -> None:
        self._outbox.copy_(made.detach())
        if not bool(self._outbox.float().sum().isfinite()):
            raise NonFiniteLoss(self._diverged("an activation or its gradient"))

    def _finite(self, loss: Tensor) -> float:
        value = float(loss.detach())
        if not value < float("inf"):  # NaN neither
            raise NonFiniteLoss(self._diverged("the loss"))
        return value

    def _diverged(self, what: str) -> str:
        return (
            f"training diverged at update {self._weights.newest} of stage {self._stage}: {what} is not finite; "
            "lower train.learning_rate if it happens again"
        )

    def _tokens_of(self, microbatch: Microbatch) -> Tensor:
        """(rows, length + 1): the part of a batch that (run seed, lane, index) names, the same on both ends."""
        batch, part = divmod(microbatch.index, self._spec.pipeline.microbatches)
        if microbatch.held_out:
            windows = self._held_out[batch % self._spec.train.eval_batches]
        else:
            windows = self._lane(microbatch.lane)[batch]
        rows = torch.from_numpy(windows[part * self._rows : (part + 1) * self._rows])
        return rows.to(self._device)

    def _lane(self, lane: int) -> Batches:
        if lane not in self._lanes:
            if len(self._lanes) >= KEPT_LANES:
                del self._lanes[next(iter(self._lanes))]
            size = (self._spec.train.batch_size, self._spec.data.sequence_length)
            self._lanes[lane] = Batches(self._shards.train, self._spec.seed, lane_name(lane), *size)
        return self._lanes[lane]


def cut_digest(spans: list[range]) -> str:
    """Of where each stage begins, hex: another version may cut by other costs."""
    return hashlib.sha256(" ".join(str(span.start) for span in spans).encode()).hexdigest()


def lane_name(lane: int) -> str:
    """Who draws the batches of a lane, for `Batches`."""
    return f"pipeline lane {lane}"
