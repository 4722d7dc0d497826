"""The headlines of the five papers, each beside what is measured or predicted here.

    python -m benchmarks.claims [--paper TACO] [--quick | --run NAME] [--inner inductor]

writes ``benchmarks/results/claims.json`` and ``docs/papers.md``. Errors and bytes are those of
``torch.compile(backend=commpass.backend(...))`` on four real ranks over gloo. What takes minutes is
an experiment: ``--run`` repeats one, ``--quick`` none.
"""
