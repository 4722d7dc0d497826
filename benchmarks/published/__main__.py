"""Predict every published row and write the JSON and the page.

python -m benchmarks.published
"""

from __future__ import annotations

from benchmarks.published import page, results

if __name__ == "__main__":
    found = results.all_rows()
    results.write(found)
    page.write(found)
    page.show(found)
