"""What the examples share: a small language model, text to train it on, and trainings of it under
several policies; ``shown.py`` compares them.

All that is particular to commpass is its backend, two lines in ``train``.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from statistics import fmean
from sysconfig import get_paths
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from hosts import NO_HOSTS
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.run import main as torchrun
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import commpass
from commpass.plan import dump
from commpass.plan.kinds import KINDS
from commpass.report.operators import operation_kind

BATCH, CONTEXT, HEAD = 8, 128, 32  # sequences a step, bytes a sequence, width of an attention head
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))
STARTED = "RANK" in os.environ  # whether this is one of the ranks
OWN_HOSTS = "COMMPASS_DEMO_HOSTS"  # environment variable: each rank has a host, and a real link
TRACE = "step.trace.json"
ROUNDS = 20  # in which steps are timed
console = Console(quiet=RANK > 0, highlight=False, markup=False)


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # q, k and v may be divided by columns: each rank then has some of the heads, and these
        # whole
        q, k, v = (
            linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, mlp: Callable[[int], nn.Module]):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width), Attention(width)
        self.norm2, self.mlp = nn.RMSNorm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, mlp: Callable[[int], nn.Module] = MLP):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, mlp) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes ``[BATCH, CONTEXT + 1]`` in, the mean cross entropy of each next byte out."""
        x = self.token(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def read_texts(most: int = 4_000_000) -> tuple[Tensor, ...]:
    """Bytes to train on and bytes held out: the sources of Python's standard library, in the same
    order everywhere."""
    root = Path(get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(
        path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts)
    )
    text = bytearray(b"".join(map(Path.read_bytes, files))[:most])
    return torch.frombuffer(text, dtype=torch.uint8).tensor_split([len(text) // 10 * 9])


def batches(text: Tensor, count: int, seed: int, rank: int = 0) -> Iterator[Tensor]:
    """Random windows of the text ``[BATCH, CONTEXT + 1]``: the same ones for the same seed, and
    others for another data-parallel rank."""
    # torch's generator for a CPU reads no more than 32 bits of a seed
    generator = torch.Generator().manual_seed(seed + (rank << 16))
    windows = text.unfold(0, CONTEXT + 1, 1)
    return (
        windows[torch.randint(len(windows), (BATCH,), generator=generator)].long()
        for _ in range(count)
    )


@dataclass(frozen=True)
class Example:
    """What is particular to an example: the whole model, how it is divided over the ranks, and what
    is to be done with the gradients after backward."""

    build: Callable[[Namespace], nn.Module]
    divide: Callable[[Any, DeviceMesh], None]
    finish_gradients: Callable[[nn.Module], None] = lambda model: None
    data_parallel: bool = (
        False  # whether each rank has batches of its own; else heads are divided over the ranks
    )
    sequence_parallel: bool = False  # whether positions are divided over the ranks
    steps: int = 150
    layers: int = 4


@dataclass
class Run:
    """What one training gave: the loss of every step and on held-out text (means over ranks), the
    plans, what one rank sent in a step (a mean), measured where the plans cannot tell, one ``step``
    more, and milliseconds that each of some steps took."""

    losses: list[float]
    held_out: float
    plans: list[commpass.Plan]
    sent: float | None
    step: Callable[[], Any]
    took_ms: list[float] = field(default_factory=list)


def train(
    name: str,
    policy: str | commpass.Policy,
    example: Example,
    options: Namespace,
    mesh: DeviceMesh,
    texts: tuple[Tensor, ...],
) -> Run:
    """Trains a new model, from the same seed and on the same batches, with its collectives under
    ``policy``."""
    torch.manual_seed(options.seed)
    model = example.build(options)
    example.divide(model, mesh)
    folder, earlier = options.out / name, len(commpass.plans())
    for file in dump.files(folder) if RANK == 0 else ():  # those of an earlier run
        file.unlink()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    backend = commpass.backend(policy, profile=commpass.ethernet(options.link_gbit), dump=folder)
    loss_of = torch.compile(model, backend=backend, fullgraph=True)
    losses = list[float]()
    own = RANK if example.data_parallel else 0

    def step(batch: Tensor) -> float:
        loss = loss_of(batch)
        loss.backward()
        example.finish_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for batch in track(
        batches(texts[0], options.steps, options.seed, own),
        f"{name:4}",
        options.steps,
        console=console,
        disable=RANK > 0,
    ):
        losses.append(step(batch))
    # not under no_grad: that would compile another graph, and it is the one of the training that is
    # to be judged
    held_out = fmean(loss_of(batch).item() for batch in batches(texts[1], 16, options.seed, own))
    trace_step(lambda: loss_of(batch).backward(), folder / TRACE)
    plans = commpass.plans()[earlier:]
    unknown = any(site.bytes < 0 for plan in plans for site in plan)
    sent = mean(bytes_sent(lambda: loss_of(batch).backward())) if unknown else None
    return Run([mean(loss) for loss in losses], mean(held_out), plans, sent, lambda: step(batch))


def take_turns(runs: dict[str, Run], rounds: int) -> None:
    """Times some steps more of all runs in turns, so that what else the machine does meets all of
    them; each begins behind a barrier, and takes as long as the slowest rank."""
    for _ in track(range(rounds), "time", console=console, disable=RANK > 0):
        for run in runs.values():
            dist.barrier()
            start = time.perf_counter()
            run.step()
            took = torch.tensor(1e3 * (time.perf_counter() - start))
            dist.all_reduce(took, dist.ReduceOp.MAX)
            run.took_ms.append(took.item())


def mean(value: float) -> float:
    """The mean over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def trace_step(step: Callable[[], Any], path: Path) -> None:
    """Writes what the profiler sees of a step on rank 0."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # nothing on the console
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    if RANK == 0:
        profile.export_chrome_trace(str(path))


def bytes_sent(step: Callable[[], Any]) -> int:
    """The bytes that this rank hands to the collectives of compiled graphs in a step, as the
    profiler sees them."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        step()
    sizes = {"unsigned char": 1, "float": 4, "long int": 8}
    calls = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.name().startswith(("_c10d_functional::", "commpass::"))
    ]
    return sum(
        prod(call.shapes()[0]) * sizes[call.dtypes()[0]]
        for call in calls
        if operation_kind(call.name()) in KINDS
    )


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leaves with 2 after one line of rank 0. The others let it go first: torchrun ends all
        ranks when one leaves."""
        if RANK > 0:
            time.sleep(5)
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n" if RANK == 0 else None)


def shared_options(
    *,
    steps: int,
    layers: int,
    policy: str = "balanced",
    width: int = 256,
    ranks: int = RANKS,
    link_gbit: float = 1.0,
) -> Parser:
    """The options that all trainings have, with their defaults."""
    parser = Parser(
        description="Train without and with compressed collectives.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", default=policy, help="a preset by name, or a .toml file")
    parser.add_argument(
        "--ranks",
        type=int,
        default=RANKS if STARTED else ranks,
        help="processes to start, where torchrun has not done so",
    )
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument(
        "--link-gbit", type=float, default=link_gbit, help="the network to decide for, in Gbit/s"
    )
    parser.add_argument("--layers", type=int, default=layers, help="blocks of the model")
    parser.add_argument("--width", type=int, default=width, help="features of the model")
    return parser


def check_options(parser: Parser, options: Namespace, sharing: int) -> None:
    """Leaves with an error where an option cannot be; ``sharing`` ranks divide the heads."""
    for name in ("ranks", "steps", "layers", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if STARTED and options.ranks != RANKS:
        parser.error(
            f"--ranks {options.ranks}: torchrun started {RANKS}; leave it out, or start with python"
            " instead"
        )
    if options.width % (unit := HEAD * sharing):
        which = f"heads of {HEAD}" if sharing == 1 else f"{sharing} ranks, heads of {HEAD}"
        parser.error(f"--width {options.width}: must be a multiple of {unit} ({which})")
    if not 0 < options.link_gbit < inf:
        parser.error(f"--link-gbit {options.link_gbit}: must be a number of Gbit/s above 0")
    try:
        commpass.backend(options.policy)
    except commpass.CommpassError as error:
        parser.error(str(error))


def read_options(example: Example) -> Namespace:
    parser = shared_options(steps=example.steps, layers=example.layers)
    parser.add_argument(
        "--out",
        type=Path,
        default="demo-out",
        help="folder for plans and graphs; earlier ones are replaced",
    )
    options = parser.parse_args()
    check_options(parser, options, 1 if example.data_parallel else options.ranks)
    if example.sequence_parallel and CONTEXT % options.ranks:
        parser.error(f"--ranks {options.ranks}: must divide the {CONTEXT} positions of a sequence")
    try:
        (options.out / "on").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))
    return options


def start(file: str, options: Namespace) -> None:
    """Starts the ranks: each in a host of its own with a link of the rate that is decided for,
    where root allows that, and otherwise all on this one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, file, *sys.argv[1:]]
    hosts = [str(Path(__file__).with_name("hosts.py")), str(options.ranks), str(options.link_gbit)]
    code = subprocess.run(
        [sys.executable, *hosts, "--", *command], env={**os.environ, OWN_HOSTS: "1"}, check=False
    ).returncode
    if code != NO_HOSTS:
        sys.exit(code)
    torchrun(["--standalone", f"--nproc-per-node={options.ranks}", file, *sys.argv[1:]])


def join() -> None:
    """Joins the ranks: before a model is built, since that may ask the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def begin(options: Namespace, model: nn.Module) -> None:
    """Says what is trained where."""
    handler = RichHandler(
        console=console if RANK == 0 else Console(stderr=True), show_time=False, show_path=False
    )
    logging.basicConfig(format=f"rank {RANK}: %(message)s", handlers=[handler])
    logging.getLogger("commpass").setLevel(logging.INFO if RANK == 0 else logging.WARNING)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    console.print(
        f"{millions:.1f} million parameters on {options.ranks} ranks, policy {options.policy}",
        style="bold",
    )
    if OWN_HOSTS in os.environ:
        where = f"Each rank has a host of its own, and a real link of {options.link_gbit:g} Gbit/s."
    elif int(os.environ.get("LOCAL_WORLD_SIZE", RANKS)) < RANKS:
        where = f"The ranks are on several hosts; decisions are for {options.link_gbit:g} Gbit/s."
    else:
        where = (
            f"Decisions are made for a link of {options.link_gbit:g} Gbit/s, but the ranks talk"
            " over loopback, which is faster than any network: the step times below cannot show"
            " what is gained. As root (sudo make demo) each rank gets a host and a link of its own."
        )
    console.print(where)


def main(file: str, example: Example) -> None:
    from shown import report

    options = read_options(example)
    if not STARTED:
        start(file, options)
        return
    join()
    begin(options, example.build(options))
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("ranks",))
    texts = read_texts()
    policies = {"off": "off", "bf16": commpass.Policy(name="bf16", codecs="bf16")}
    runs = {
        name: train(name, policy, example, options, mesh, texts)
        for name, policy in (policies | {"on": options.policy}).items()
    }
    take_turns(runs, ROUNDS)
    if RANK == 0:  # whose dumps and traces those are
        report(runs, options)
    dist.barrier()
    dist.destroy_process_group()
