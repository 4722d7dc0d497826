"""Predict steps of large models on clusters of 8 to 100,000 GPUs, by policy.

    python -m benchmarks.clusters [--keep]

One layer of each model is simulated on its mesh with ``commpass.simulate``, and a step is computed
from it (``steps.py``). The results are in ``benchmarks/results/clusters.json``, and the page
``docs/clusters.md`` with its picture is written from them. With ``--keep`` nothing is simulated:
the page is written from the results that are there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .draw import draw
from .page import page
from .run import run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "clusters.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="use the results that are there")
    if not parser.parse_args().keep:
        RESULTS.write_text(json.dumps(run(), indent=1) + "\n")
    found = json.loads(RESULTS.read_text())
    (ROOT / "docs" / "clusters.md").write_text(page(found))
    draw(found, ROOT / "docs" / "clusters.png")
    print(f"docs/clusters.md: {len(found['rows'])} clusters in {found['seconds']} s of two cores")


if __name__ == "__main__":
    main()
