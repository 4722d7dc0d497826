"""Check every generated kernel on a GPU against float64, then time it, in under 9 minutes.

    python benchmarks/gpu/run.py [--minutes 8.5] [--json FILE] [--only JOB ...]
    python benchmarks/gpu/run.py --dry          # no GPU: Triton interprets, tiny, nothing is timed
    python benchmarks/gpu/run.py --sanitize     # the checks alone, small, under compute-sanitizer

The machine needs one H100 or H200. Each job is a separate process: a kernel that breaks the GPU
context of its process affects no other. Checks run side by side, which also compiles the timed
kernels; then each timing has the GPU alone. Jobs are in the order of their importance, and jobs for
which no time was left are named. The exit status is 1 if any check failed. Inputs differ in each
run: ``--seed`` repeats those of a run.

A share `of a copy` is the time of a copy that reads and writes as many bytes, in the same process,
over the time of the kernel. `spread` is that of the middle four fifths of the samples, over their
median.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from benchmarks.gpu.show import Found, counts, show

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "numpy", "commpass")
CHECKS = 0.6
"""The share of the time after which checks that have not begun are left out."""
LAST_S = 5
"""Seconds reserved for the tables."""
SANITIZER = "compute-sanitizer"
HEARTBEAT_S = 20
"""Seconds between reports of what still runs."""
STARTED_S = 15
"""Seconds that a process needs before its job begins: no job is started with less left."""
GRACE_S = 30
"""Seconds for a check that has begun when the time for checks is over."""


@dataclass(frozen=True)
class Job:
    """One job.

    ``call`` is ``module:function``, and ``given`` has its other arguments. A job that is ``alone``
    is timed, and has the GPU alone.
    """

    name: str
    call: str
    given: tuple[str, ...] = ()
    alone: bool = False

    def run(self, bench: Any) -> None:
        module, _, function = self.call.partition(":")
        called: Callable[..., None] = getattr(
            importlib.import_module(f"benchmarks.gpu.{module}"), function
        )
        called(bench, *self.given)


def jobs() -> list[Job]:
    """Return all jobs, the most important first."""
    from benchmarks.gpu.checks import CODECS
    from benchmarks.gpu.others import SPARSE
    from benchmarks.gpu.timing import MATMULS

    return [
        Job("copy", "timing:copy", alone=True),
        *(Job(f"check {spec}", "checks:block", (spec,)) for spec in CODECS[:6]),
        *(
            Job(f"check matmul configurations {spec}", "others:configurations", (spec,))
            for spec in MATMULS
        ),
        Job("check norms", "norms:check"),
        *(
            Job(f"check {spec} {dtype}", "others:exponent", (spec, dtype))
            for spec in ("exponent", "exponent(planes=3)")
            for dtype in ("bfloat16", "float32", "float16")
        ),
        Job("check matmul", "others:matmul"),
        *(Job(f"check sparse {spec}", "others:sparse", (spec,)) for spec in SPARSE),
        Job("ranks", "ranks:run"),
        Job("graphs", "ranks:run_graphs"),
        Job("single kernels", "ranks:run_single"),
        Job("models", "ranks:run_models"),
        Job("eager", "ranks:run_eager"),
        Job("torch.compile", "rivals:compiled"),
        *(Job(f"check {spec}", "checks:block", (spec,)) for spec in CODECS[6:]),
        Job("time block codecs", "timing:blocks", alone=True),
        Job("time matmul", "timing:matmul", alone=True),
        Job("time order", "ranks:run_ordered", alone=True),
        Job("time norms", "norms:time", alone=True),
        Job("time exponent", "timing:exponent", alone=True),
        Job("time sparse", "timing:sparse", alone=True),
        Job("rivals", "rivals:timed", alone=True),
    ]


# --- a process of one job, or of several in sequence ----------------------------------------------


def work(options: argparse.Namespace) -> None:
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    import warnings

    import torch

    from benchmarks.gpu.bench import Bench, Lost

    if not options.dry and not torch.cuda.is_available():
        sys.exit("no GPU here: --dry needs none")
    warnings.filterwarnings("ignore")  # infinities in the interpreter
    torch.set_num_threads(1 if options.dry else 2)
    known = {job.name: job for job in jobs()}
    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    for name in options.job:
        bench = Bench(
            name,
            device,
            options.seed,
            dry=options.dry,
            small=options.small,
            out=options.out,
            until=options.until,
        )
        bench.say("began")
        try:
            with bench.part(name):
                known[name].run(bench)
        except Lost as lost:
            bench.check(f"{name}: the rest", False, f"the card was lost to this process: {lost}")
            os._exit(1)  # memory of a lost context cannot be freed
        bench.say("done")


@dataclass
class Member:
    """A running process."""

    names: list[str]
    process: subprocess.Popen
    out: Path
    log: Path
    ended: bool = False

    @property
    def last(self) -> str:
        """Return its last report."""
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        if not lines or len(lines[-1]) > 1 << 16:
            return " + ".join(self.names[:3])
        found = re.search(r'"job": ("[^"]*")', lines[-1])
        return f"{found[1] if found else self.names[0]} ({len(lines)} results)"


class Crew:
    """Start processes, collect their results, and stop those whose time is up."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.folder = Path(tempfile.mkdtemp(prefix="gpu"))
        self.start = time.time()
        self.until = self.start + options.minutes * 60 - LAST_S
        self.found: list[Found] = []
        self.started = 0

    def run(self, groups: Sequence[list[str]], side_by_side: int, until: float) -> None:
        """Run groups of jobs, one process per group.

        Groups that have not begun by ``until`` are left out. Those that still run a while later are
        stopped.
        """
        waiting, members, said = list(groups), list[Member](), time.time()
        while waiting or members:
            while waiting and len(members) < side_by_side:
                names = waiting.pop(0)
                if time.time() + STARTED_S > until:
                    self.found += [_left_out(name, "all of it, for want of time") for name in names]
                else:
                    members.append(self._start(names, until))
            for member in [each for each in members if each.process.poll() is not None]:
                members.remove(member)
                self._collect(member)
            if time.time() > min(until + GRACE_S, self.until + LAST_S / 2):
                for member in members:
                    member.process.kill()
                    member.process.wait()
                    member.ended = True
            if members and time.time() - said > HEARTBEAT_S:
                said = time.time()
                self._say(f"at work: {', '.join(each.last for each in members)}")
            time.sleep(0.05)

    def _start(self, names: list[str], until: float) -> Member:
        options, self.started = self.options, self.started + 1
        out, log = (self.folder / f"{self.started}.{end}" for end in ("jsonl", "log"))
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]
        command += ["--job", *names, "--out", str(out), "--seed", str(options.seed)]
        command += ["--until", str(until)]
        command += ["--dry"] if options.dry else []
        command += ["--small"] if options.small else []
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
        if options.sanitize:
            tool = ["--tool", options.sanitize, "--error-exitcode", "9"]
            command = [SANITIZER, *tool, "--target-processes", "all", *command]
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        with log.open("wb") as file:
            process = subprocess.Popen(
                *(command,), stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
            )
        return Member(names, process, out, log)

    def _collect(self, member: Member) -> None:
        lines = member.out.read_text().splitlines() if member.out.exists() else []
        found = [json.loads(line) for line in lines]
        done = {each["job"] for each in found if each["kind"] == "done"}
        self.found += [each for each in found if each["kind"] not in ("began", "done")]
        code, log = member.process.returncode, member.log.read_text(errors="replace")
        if path := file_for(self.found, self.options):  # in case the whole run is stopped
            written(path, self.found, self.options)
        for name in member.names:
            if name not in done:
                self._unfinished(member, name, code, log)
            if self.options.sanitize:
                said = [line for line in log.splitlines() if "ERROR SUMMARY" in line]
                clean = code != 9 and any(" 0 errors" in line for line in said)
                tool, text = self.options.sanitize, " ".join(said) or log[-600:]
                self._check(name, f"{name}: {tool} is clean", clean, text)
            self._tell(name)

    def _unfinished(self, member: Member, name: str, code: int, log: str) -> None:
        if member.ended:
            self.found.append(_left_out(name, "the rest, for want of time"))
        elif not any(each["job"] == name and not each.get("passed", True) for each in self.found):
            last = "\n".join(log.strip().splitlines()[-8:])
            said = f"its process ended with {code}: {last}"
            self._check(name, f"{name}: came to its end", False, said)

    def _check(self, job: str, name: str, passed: bool, said: str) -> None:
        self.found.append(
            {"kind": "check", "job": job, "name": name, "passed": passed, "said": said}
        )

    def _tell(self, name: str) -> None:
        own = counts([each for each in self.found if each["job"] == name])
        words = ", ".join(f"{many} {what}" for what, many in own.items() if many)
        self._say(f"{name}: {words or 'done'}")

    def _say(self, words: str) -> None:
        spent = f"{time.time() - self.start:5.0f} s"
        self.console.print(f"{spent}  {words}", markup=False, highlight=False)


def _left_out(job: str, name: str) -> Found:
    return {"kind": "left out", "job": job, "name": name}


# --- the whole run --------------------------------------------------------------------------------


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/gpu_CARD.json")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="jobs by name: see --list")
    parser.add_argument("--list", action="store_true", help="the names of all jobs")
    parser.add_argument("--dry", action="store_true", help="no GPU: tiny, and nothing is timed")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a GPU")
    parser.add_argument("--sanitize", nargs="?", const="memcheck", help=f"a tool of {SANITIZER}")
    parser.add_argument("--together", type=int, default=0, help="processes at once")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all inputs")
    for hidden, kind in (("--out", Path), ("--until", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Job]:
    known = jobs()
    names = [job.name for job in known]
    if unknown := set(options.only or ()) - set(names):
        sys.exit(f"no such jobs: {', '.join(unknown)}; there are {', '.join(names)}")
    found = [job for job in known if not options.only or job.name in options.only]
    if options.sanitize:  # the sanitizer is not meant for other processes and compiled code
        found = [job for job in found if job.name.startswith("check")]
    return found


def facts(found: Sequence[Found]) -> dict[str, Any]:
    card = next((each for each in found if each["name"] == "card"), {"said": ""})
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "card": card["said"],
        "clocks": card.get("clocks", ""),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def file_for(found: Sequence[Found], options: argparse.Namespace) -> Path | None:
    """Return where results go; a dry or partial run has no file unless one is named."""
    if options.json or options.dry or options.only or options.sanitize or options.small:
        return options.json
    card = facts(found)["card"] or "unknown"
    return RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', card.lower()).strip('_')}.json"


def written(path: Path, found: Sequence[Found], options: argparse.Namespace) -> None:
    """Write the results: of passed checks, only how far the bits are from the plain form's;
    everything else whole."""
    differ = {each["name"]: each["differ"] for each in found if "differ" in each}
    kept = [each for each in found if not each.get("passed") and "differ" not in each]
    parts = {
        name: [_without_kind(each) for each in kept if each["kind"] == kind]
        for name, kind in (
            ("failed", "check"),
            ("timings", "timing"),
            ("notes", "note"),
            ("left_out", "left out"),
        )
    }
    parts["failed"] += [
        _without_kind(each) for each in found if "differ" in each and not each.get("passed", True)
    ]
    said = {**facts(found), "seed": options.seed, "minutes": options.minutes}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**said, "counts": counts(found), **parts, "bits that differ": differ}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _without_kind(each: Found) -> Found:
    return {key: value for key, value in each.items() if key != "kind"}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    options = parsed()
    if options.job:
        work(options)
        return 0
    if options.list:
        print("\n".join(job.name for job in jobs()))
        return 0
    console = Console(width=160 if not sys.stdout.isatty() else None)
    if not options.dry and not has_gpu():
        console.print("torch finds no GPU here: --dry interprets the kernels without one")
        return 2
    if options.sanitize:
        options.small = True
        if shutil.which(SANITIZER) is None:
            console.print(f"{SANITIZER} is not on the PATH")
            return 2
    crew, plan = Crew(options, console), chosen(options)
    if options.dry:
        crew.run([[job.name for job in plan]], 1, crew.until)
    else:
        together = options.together or max(1, min(12, (os.cpu_count() or 2) - 2))
        timed = any(job.alone and job.name != "copy" for job in plan)
        checked = crew.start + options.minutes * 60 * CHECKS if timed else crew.until
        crew.run([[job.name] for job in plan if job.name == "copy"], 1, crew.until)
        crew.run([[job.name] for job in plan if not job.alone], together, checked)
        crew.run([[job.name] for job in plan if job.alone and job.name != "copy"], 1, crew.until)
    show(crew.found, console)
    path = file_for(crew.found, options)
    if path is not None:
        written(path, crew.found, options)
        console.print(f"written to {path}", highlight=False)
    console.print(f"{time.time() - crew.start:.0f} s", highlight=False)
    return int(counts(crew.found)["checks failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
