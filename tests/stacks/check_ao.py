"""torchao, the real one, on CPUs: ``make stacks STACK=ao``.

Trains and runs small float8 and int8 models on 2 and 4 gloo ranks, without commpass and with two
policies, and runs the scripts of ``docs/torchao.md``. Exits with 0 only if the numbers are right.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ao_cases import CASES, Case

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "stacks" / "ao"
PAGE = HERE.parents[1] / "docs" / "torchao.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
NEAR, LONGEST_S = 0.002, 1800
Outcomes = dict[str, dict[str, Any]]


def start(ranks: int, script: Path, *arguments: str) -> str:
    """Run a script under torchrun and return its output; end with it if the script fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *arguments]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    (BUILD / f"{script.stem}_{ranks}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def check(holds: bool, what: str) -> None:
    print(("ok:     " if holds else "FAILED: ") + what, flush=True)
    if not holds:
        raise SystemExit(1)


def check_stop(name: str, expected: str, plain: dict[str, Any]) -> None:
    error = plain.get("error", "no error")
    first = error.partition("\n")[0][:120]
    check(expected in error, f"{name}: stops without commpass, at {plain.get('line')}: {first}")


def check_case(name: str, case: Case, outcomes: Outcomes) -> None:
    """Compare the outcomes of one case, by policy, with what is expected."""
    if case.stops or case.plain_stops:
        check_stop(name, case.stops or case.plain_stops, outcomes["plain"])
        if case.stops:
            return
    exact, coded = outcomes["lossless"], outcomes["balanced"]
    plain = exact if case.plain_stops else outcomes["plain"]
    for policy, each in (("plain", plain), ("lossless", exact), ("balanced", coded)):
        check("error" not in each, f"{name}, {policy}: {each.get('error', 'runs')}")
    print(f"        losses {plain['losses']}, balanced {coded['losses']}")
    check(exact["losses"] == plain["losses"], f"{name}: lossless has the same bits")
    check(not exact["fallback"] + coded["fallback"], f"{name}: no plan fell back")
    check(not exact["unexplained"] + coded["unexplained"], f"{name}: each site has a reason")
    if case.simplified:
        check(case.simplified in exact["simplified"], f"{name}: {case.simplified}")
    pairs = list(zip(plain["losses"], coded["losses"], strict=True))
    worst = max(abs(b / a - 1) for a, b in pairs)
    check(worst < NEAR, f"{name}: balanced differs by {worst:.4%}")
    before, after = coded["bytes"]
    share = f"{before:,} bytes as {after:,}, lossless {exact['bytes'][1]:,}"
    text = f"{name}: {coded['compressed']} of {coded['sites']} sites compressed, {share}"
    check(coded["compressed"] > 0 and after <= case.ratio * before, text)


def check_cases(ranks: int) -> None:
    names = [name for name, case in CASES.items() if case.ranks == ranks]
    lines = start(ranks, HERE / "ao_cases.py", *names).splitlines()
    found: dict[str, Outcomes] = {name: {} for name in names}
    for line in lines:
        if line.startswith("{"):
            outcome = json.loads(line)
            found[outcome["case"]][outcome["policy"]] = outcome
    for name in names:
        check_case(name, CASES[name], found[name])


def check_page() -> None:
    """Run the scripts of the page as they are printed."""
    scripts = BLOCK.findall(PAGE.read_text())
    check(len(scripts) >= 2, f"{PAGE.name} has scripts")
    for number, text in enumerate(scripts):
        script = BUILD / f"page_{number}.py"
        script.write_text(text)
        output = start(2, script)
        print(output.strip())
        compressed = re.search(r"(\d+) compressed", output)
        found = compressed is not None and int(compressed[1]) > 0
        check(found, f"script {number} of the page: sites are compressed")


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    check_page()
    for ranks in sorted({case.ranks for case in CASES.values()}):
        check_cases(ranks)


if __name__ == "__main__":
    main()
