"""Code shared by the examples: a small language model, its training text, and training under
several policies.

Only two lines in ``train`` are specific to commpass: they create and use its backend. ``shown.py``
prints the comparison of the runs.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from statistics import fmean
from sysconfig import get_paths
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from hosts import NO_HOSTS, STOPPED
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.run import main as torchrun
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import commpass
from commpass.plan import dump
from commpass.plan.kinds import KINDS
from commpass.report.operators import operation_kind

# sequences per step, bytes per sequence, width of an attention head
BATCH, CONTEXT, HEAD = 8, 128, 32
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))
STARTED = "RANK" in os.environ  # whether this process is one of the ranks
OWN_HOSTS = "COMMPASS_DEMO_HOSTS"  # environment variable: set if each rank has its own host
TRACE = "step.trace.json"
HELD_OUT = 8  # number of batches that are evaluated
UNTIMED = 2  # first steps of a run, which compile and fill caches
console = Console(quiet=RANK > 0, highlight=False, markup=False)


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # if q, k and v are sharded by columns, each rank has whole heads, but only some of them
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
        """Return the mean cross entropy of each next byte, for bytes of shape
        ``[BATCH, CONTEXT + 1]``."""
        x = self.token(text[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def read_texts(max_bytes: int = 4_000_000) -> tuple[Tensor, ...]:
    """Return training bytes and held-out bytes: the sources of Python's standard library, in the
    same order on every machine."""
    files, text = list[Path](), bytearray()
    for folder, folders, names in os.walk(get_paths()["stdlib"]):
        folders[:] = {*folders} - {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(files):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    del text[max_bytes:]
    return torch.frombuffer(text, dtype=torch.uint8).tensor_split([len(text) // 10 * 9])


def batches(text: Tensor, count: int, seed: int, rank: int = 0) -> Iterator[Tensor]:
    """Return an iterator over random windows of the text, of shape ``[BATCH, CONTEXT + 1]``.

    The same seed gives the same windows. Each data-parallel rank gets different ones.
    """
    # torch's CPU generator uses only 32 bits of a seed
    generator = torch.Generator().manual_seed(seed + (rank << 16))
    windows = text.unfold(0, CONTEXT + 1, 1)
    return (
        windows[torch.randint(len(windows), (BATCH,), generator=generator)].long()
        for _ in range(count)
    )


@dataclass(frozen=True)
class Example:
    """The parts that differ between examples: the model, how it is sharded over the ranks, and what
    is done with the gradients after backward."""

    build: Callable[[Namespace], nn.Module]
    divide: Callable[[Any, DeviceMesh], None]
    finish_gradients: Callable[[nn.Module], None] = lambda model: None
    data_parallel: bool = False  # if not, the ranks share batches, and heads are sharded over them
    sequence_parallel: bool = False  # whether the sequence is sharded over the ranks
    steps: int = 40
    layers: int = 2
    width: int = 256
    link_gbit: float = 1.0


@dataclass
class Run:
    """One training, and its results.

    ``losses`` has the loss of every step, as the mean over the ranks, and ``held_out`` the loss on
    held-out text. ``step_ms`` has the milliseconds of the timed steps. ``sent`` is the mean number
    of bytes that a rank sends in a step; it is measured only if the plans cannot tell.
    """

    loss_of: Callable[[Tensor], Tensor]
    step: Callable[[Tensor], float]
    folder: Path
    plans: list[commpass.Plan] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    held_out: float = 0.0
    sent: float | None = None


def prepare(
    name: str,
    policy: str | commpass.Policy,
    example: Example,
    options: Namespace,
    mesh: DeviceMesh,
) -> Run:
    """Return a new model to train with its collectives under ``policy``; the first step compiles
    it.

    Every call uses the same seed.
    """
    torch.manual_seed(options.seed)
    model = example.build(options)
    example.divide(model, mesh)
    folder = options.out / name
    for file in dump.files(folder) if RANK == 0 else ():  # files of an earlier run
        file.unlink()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    backend = commpass.backend(policy, profile=commpass.ethernet(options.link_gbit), dump=folder)
    loss_of = torch.compile(model, backend=backend, fullgraph=True)

    def step(batch: Tensor) -> float:
        loss = loss_of(batch)
        loss.backward()
        example.finish_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Run(loss_of, step, folder)


def train(runs: Mapping[str, Run], all_batches: Iterator[Tensor], steps: int) -> None:
    """Train in turns, so that other load on the machine affects all runs alike.

    The first step of a run compiles its model. All steps but the first ``UNTIMED`` are timed: each
    starts after a barrier, and its time is that of the slowest rank.
    """
    hidden = RANK > 0 or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as progress:
        shown = progress.add_task("", total=steps * len(runs))
        for number, batch in enumerate(all_batches):
            for name, run in runs.items():
                what = f"compiling {name}" if number == 0 else "training"
                progress.update(shown, description=what)
                earlier = len(commpass.plans())
                dist.barrier()
                start = time.perf_counter()
                loss = run.step(batch)
                elapsed_ms = torch.tensor(1e3 * (time.perf_counter() - start))
                dist.all_reduce(elapsed_ms, dist.ReduceOp.MAX)
                run.plans += commpass.plans()[earlier:]
                run.losses.append(mean(loss))
                if number >= UNTIMED:
                    run.step_ms.append(elapsed_ms.item())
                progress.advance(shown)


def evaluate(run: Run, held_out: Sequence[Tensor]) -> None:
    """Set the results of a training: its loss on held-out batches, the trace of a step, and the
    bytes."""
    # not under no_grad, which would compile another graph: the training graph is what is evaluated
    run.held_out = mean(fmean(run.loss_of(batch).item() for batch in held_out))
    batch = held_out[0]
    trace_step(lambda: run.loss_of(batch).backward(), run.folder / TRACE)
    if any(site.bytes < 0 for plan in run.plans for site in plan):
        run.sent = mean(bytes_sent(lambda: run.loss_of(batch).backward()))


def mean(value: float) -> float:
    """Return the mean over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def trace_step(step: Callable[[], Any], path: Path) -> None:
    """Write the profiler's trace of one step on rank 0."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages on the console
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    if RANK == 0:
        profile.export_chrome_trace(str(path))


def bytes_sent(step: Callable[[], Any]) -> int:
    """Return the bytes that this rank passes to the collectives of compiled graphs in a step,
    according to the profiler."""
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
        """Exit with status 2 after rank 0 has printed one line.

        The other ranks wait first, because torchrun stops all ranks when one exits.
        """
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
    """Return a parser with the options that all examples share, and their defaults."""
    parser = Parser(
        description="Train without and with compressed collectives.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", default=policy, help="name of a preset, or a .toml file")
    parser.add_argument(
        "--ranks",
        type=int,
        default=RANKS if STARTED else ranks,
        help="processes to start, unless torchrun has started them",
    )
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument(
        "--link-gbit", type=float, default=link_gbit, help="rate of the assumed link, in Gbit/s"
    )
    parser.add_argument("--layers", type=int, default=layers, help="blocks of the model")
    parser.add_argument("--width", type=int, default=width, help="features of the model")
    return parser


def check_options(parser: Parser, options: Namespace, sharing: int) -> None:
    """Exit with an error if an option is invalid; ``sharing`` ranks share the attention heads."""
    for name in ("ranks", "steps", "layers", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    if STARTED and options.ranks != RANKS:
        parser.error(
            f"--ranks {options.ranks}: torchrun started {RANKS} ranks; omit --ranks, or start with"
            " python instead"
        )
    if options.width % (unit := HEAD * sharing):
        which = f"heads of {HEAD}" if sharing == 1 else f"{sharing} ranks, heads of {HEAD}"
        parser.error(f"--width {options.width}: must be a multiple of {unit} ({which})")
    if not 0 < options.link_gbit < inf:
        parser.error(f"--link-gbit {options.link_gbit}: must be a number of Gbit/s above 0")
    if STARTED:
        try:
            commpass.backend(options.policy)
        except commpass.CommpassError as error:
            parser.error(str(error))


def read_options(example: Example) -> Namespace:
    parser = shared_options(
        steps=example.steps,
        layers=example.layers,
        width=example.width,
        link_gbit=example.link_gbit,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default="demo-out",
        help="folder for plans and graphs; existing ones are replaced",
    )
    options = parser.parse_args()
    check_options(parser, options, 1 if example.data_parallel else options.ranks)
    if options.steps < UNTIMED + 2:
        parser.error(
            f"--steps {options.steps}: must be at least {UNTIMED + 2}, since the first {UNTIMED}"
            " are not timed"
        )
    if example.sequence_parallel and CONTEXT % options.ranks:
        parser.error(f"--ranks {options.ranks}: must divide the {CONTEXT} positions of a sequence")
    try:
        (options.out / "on").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))
    return options


def start(file: str, options: Namespace) -> None:
    """Start the ranks.

    As root on Linux, each rank gets its own host, with a link of ``--link-gbit``. Otherwise all
    ranks run on this host.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, file, *sys.argv[1:]]
    hosts = [str(Path(__file__).with_name("hosts.py")), str(options.ranks), str(options.link_gbit)]
    environment = {**os.environ, OWN_HOSTS: "1"}
    try:
        started = [sys.executable, *hosts, "--", *command]
        code = subprocess.run(started, env=environment, check=False).returncode
    except KeyboardInterrupt:
        leave(STOPPED)
    if code != NO_HOSTS:
        leave(code)
    torchrun(["--standalone", f"--nproc-per-node={options.ranks}", file, *sys.argv[1:]])


def leave(code: int = 0) -> NoReturn:
    """End this process without freeing what torch holds, which takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join() -> None:
    """Initialize the process group; call this before building a model, which may communicate."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def begin(options: Namespace, model: nn.Module) -> None:
    """Configure logging of warnings, and print what is trained and where."""
    handler = RichHandler(
        console=console if RANK == 0 else Console(stderr=True), show_time=False, show_path=False
    )
    logging.basicConfig(format=f"rank {RANK}: %(message)s", handlers=[handler])
    logging.getLogger("commpass").setLevel(logging.WARNING)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    console.print(
        f"{millions:.1f} million parameters on {options.ranks} ranks, policy {options.policy}",
        style="bold",
    )
    if OWN_HOSTS in os.environ:
        where = f"Each rank has its own host, with a real link of {options.link_gbit:g} Gbit/s."
    elif int(os.environ.get("LOCAL_WORLD_SIZE", RANKS)) < RANKS:
        where = f"The ranks are on several hosts. Decisions assume {options.link_gbit:g} Gbit/s."
    else:
        where = (
            f"Decisions assume {options.link_gbit:g} Gbit/s. The ranks communicate over loopback:"
            " step times cannot show the gain. As root, and started by python instead of torchrun,"
            " each rank gets its own host and link."
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
    policies = {"off": "off", "bf16": commpass.Policy(name="bf16", codecs="bf16")}
    runs = {
        name: prepare(name, policy, example, options, mesh)
        for name, policy in (policies | {"on": options.policy}).items()
    }
    text, held_out = read_texts()
    batch_rank = RANK if example.data_parallel else 0
    train(runs, batches(text, options.steps, options.seed, batch_rank), options.steps)
    unseen = list(batches(held_out, HELD_OUT, options.seed, batch_rank))
    for run in runs.values():
        evaluate(run, unseen)
    if RANK == 0:  # only rank 0 has written dumps and traces
        report(runs, options)
    dist.barrier()
    dist.destroy_process_group()
    leave()
