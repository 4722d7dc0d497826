"""Compare the headline results of the five papers with what is measured or predicted here.

    python -m benchmarks.claims [--paper TACO] [--quick | --run NAME] [--inner inductor]

The command writes ``benchmarks/results/claims.json`` and ``docs/papers.md``. Errors and bytes are
those of ``torch.compile(backend=commpass.backend(...))`` on four real ranks over gloo. Measurements
that take minutes are experiments: ``--run`` repeats one, ``--quick`` none.
"""
