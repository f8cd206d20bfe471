"""The baselines of the overhead benchmark: a training loop with nothing around it, and a process with one DHTNode.

python -m tests.benchmarks.overhead_bare loop RUN.toml CACHE WHO
python -m tests.benchmarks.overhead_bare dht
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

EVERY = 5  # steps between two lines


def loop(run: Path, cache: Path, who: str) -> None:
    """Trains for ever, one thread; prints "steps unix-time" after the first step and then every EVERY."""
    import torch
    import torch.nn.functional as F

    from peerloom.node.worker.data import Batches, prepare
    from peerloom.node.worker.model import build_model
    from peerloom.node.worker.tokenizer import load_tokenizer
    from peerloom.protocol.runspec import RunSpec

    torch.set_num_threads(1)
    spec = RunSpec.from_toml(run.read_text())
    train, length = spec.train, spec.data.sequence_length
    model = build_model(spec)
    shards = prepare(spec.data, load_tokenizer(spec.data.tokenizer), cache, lambda what, share: None)
    batches = Batches(shards.train, spec.seed, who, train.batch_size, length)
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        groups, lr=train.learning_rate / 10, betas=(train.beta1, train.beta2), eps=train.eps, fused=True
    )
    model.train()
    step = 0
    while True:
        tokens = torch.from_numpy(batches[step])
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, train.clip_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1
        if step == 1 or step % EVERY == 0:
            print(step, time.time(), flush=True)


async def dht() -> None:
    """One hivemind DHTNode that listens on loopback; prints "ready" and waits to be ended."""
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P

    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    node = await DHTNode.create(p2p=p2p)
    print("ready", flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await node.shutdown()
        await p2p.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "loop":
        loop(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        asyncio.run(dht())
