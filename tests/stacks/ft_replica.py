"""One replica group of ``check_ft.py``: trains a small model by one of torchft's methods.

Each outer step is printed as a line of JSON. ``DIE_AT`` ends the process at an outer step, before
its exchange ("3") or in it ("3.1": after one bucket of it).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo, LocalSGD

import commpass
from commpass.parallel.outer import means, residuals

EVERY, WIDTH, CONTEXT = 4, 64, 16


def build(seed: int) -> nn.Module:
    """A model of bytes: 16 in, the next one out."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 256),
        nn.GELU(),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
    )


def text() -> torch.Tensor:
    """Return the bytes of some modules of Python's standard library."""
    folder = Path(os.__file__).parent
    found = b"".join(
        (folder / name).read_bytes() for name in ("argparse.py", "typing.py", "ast.py")
    )
    return torch.tensor(list(found))


def left_over(model: nn.Module) -> float:
    """Return the squared norm of what was not sent."""
    return sum(
        float(each.double().square().sum())
        for parameter in model.parameters()
        for each in residuals.residuals_of(parameter)
    )


def forced(spec: str) -> commpass.Policy | str:
    if not spec.startswith("force:"):
        return spec
    rule = commpass.Rule(codec=spec.removeprefix("force:"), force=True)
    return commpass.Policy(rules=[rule], max_error=1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("diloco", "streaming", "localsgd", "own"))
    parser.add_argument("--policy", default="")
    parser.add_argument("--outer-steps", type=int, default=8)
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--async-quorum", action="store_true")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--policy-of-1", default="")
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--buckets", type=int, default=means.BUCKET_BYTES)
    options = parser.parse_args()
    means.BUCKET_BYTES = options.buckets
    replica = group = int(os.environ["REPLICA_GROUP_ID"])
    if options.swap:  # then the Manager gives it another number
        replica = 1 - replica
    if replica and options.policy_of_1:
        options.policy = options.policy_of_1
    die_at = os.environ.get("DIE_AT", "") if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else ""

    model, data = build(replica if options.freeze else 0), text()
    if options.freeze:
        model[2].requires_grad_(False)
    if options.shard:
        dist.init_process_group("gloo")
        for each in (model[2], model[5]):
            fully_shard(each)
        fully_shard(model)
        commpass.parallel.compress_fsdp(model, forced("force:int8"), strict=True)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    state = {"model": model, "inner": inner, "outer": outer}

    def load(saved: dict) -> None:
        for key, each in state.items():
            each.load_state_dict(saved[key])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        min_replica_size=options.min_replicas,
        load_state_dict=load,
        state_dict=lambda: {key: each.state_dict() for key, each in state.items()},
        replica_id=f"replica_{group}",
        use_async_quorum=options.async_quorum,
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(seconds=90),
    )
    arguments = {"profile": "ethernet-1g", "strict": True, "inner": options.inner}
    integration = None
    if options.method == "localsgd":
        context = LocalSGD(manager, model, inner, EVERY)
    elif options.method == "own":
        context = None
        integration = commpass.parallel.compress_outer(
            model, forced(options.policy or "off"), manager=manager, **arguments
        )
    else:
        fragments = [model] if options.method == "diloco" else [model[0:4], model[4:]]
        outers = (
            [outer]
            if len(fragments) == 1
            else [
                torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True)
                for each in fragments
            ]
        )
        if len(fragments) > 1:
            state.update({f"outer{n}": each for n, each in enumerate(outers)})
        context = DiLoCo(manager, fragments, inner, outers, EVERY * len(fragments))
    if context is not None and options.policy:
        named = {} if options.method == "localsgd" else {"model": model}
        integration = commpass.parallel.compress_outer(
            context, forced(options.policy), **named, **arguments
        )
    sent_of = integration._means if integration is not None else None
    if sent_of is not None and "." in die_at:
        plain, calls = sent_of._average, [0]

        def counted(*given: object) -> None:
            number, after = die_at.split(".")
            if manager.current_step() == int(number):
                calls[0] += 1
                if calls[0] > int(after):
                    os.kill(os.getpid(), signal.SIGKILL)
            plain(*given)

        sent_of._average = counted

    befores = []
    if integration is not None:
        average = integration.replicas.average

        def recorded(*given: object) -> None:
            befores.append(left_over(model))
            average(*given)

        integration.replicas.average = recorded

    if options.load:
        saved = torch.load(options.folder / f"{replica}.pt")
        load(saved["parts"])
        manager.load_state_dict(saved["manager"])
        integration.restart()
        integration.load_state_dict(saved["outer"])

    criterion, total = nn.CrossEntropyLoss(), 0.0
    numbers = torch.Generator().manual_seed(replica)
    last = -1
    context = context.__enter__() if context is not None else None
    local = alone = 0
    while manager.current_step() < options.outer_steps:
        starts = torch.randint(len(data) - CONTEXT - 1, (32,), generator=numbers)
        batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        if die_at and "." not in die_at and manager.current_step() == int(die_at) and local == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = criterion(model(batch[:, :-1]), batch[:, -1])
        inner.zero_grad()
        loss.backward()
        total += loss.item()
        local += 1
        inner.step()
        if context is None and local == EVERY:
            integration.step(outer)
        if local == EVERY:
            local_parts = [
                p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()
            ]
            digest = sum(p.double().sum().item() for p in local_parts)
            line = {
                "replica": replica,
                "rank": int(os.environ["RANK"]),
                "step": manager.current_step(),
                "committed": manager.current_step() != last,
                "loss": total / EVERY,
                "replicas": manager.num_participants(),
                "digest": digest.hex(),
                "before": befores,
                "residual": left_over(model),
                "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                "bytes": [integration.bytes.plain, integration.bytes.sent] if integration else None,
                "codecs": [s.codec for plan in integration.plans for s in plan]
                if integration
                else [],
            }
            os.write(1, f"{json.dumps(line)}\n".encode())  # at once: ranks share the output
            befores.clear()
            last, total, local = manager.current_step(), 0.0, 0
            alone = alone + 1 if manager.num_participants() < 2 else 0
            if alone:  # so that the other one can come back
                time.sleep(2.0 if alone < 4 else 8.0)
    if options.folder and not options.load:
        saved = {
            "parts": {key: each.state_dict() for key, each in state.items()},
            "manager": manager.state_dict(),
            "outer": integration.state_dict(),
        }
        torch.save(saved, options.folder / f"{replica}.pt")
    if integration is not None:
        print("names:", sorted(integration.state_dict()), flush=True)
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main()
