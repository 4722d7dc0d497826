"""TACO's training in three dimensions, with SDP4Bit and TahQuant."""

from __future__ import annotations

from benchmarks.claims.claim import Claim, Found
from benchmarks.claims.suites.losses import Trained

PAPER = "TACO in 3D"
TRAINED = Trained(
    "three_d_training",
    "settings",
    "off",
    "0.15 million parameters on bytes of English, a mesh of 2 x 2 x 2, float32",
)
THROUGHPUT = {"2.7B": (39.9, 1.01, 1.50), "6.7B": (61.1, 1.02, 1.53), "13B": (73.8, 1.02, 1.51)}


def three_d() -> list[Claim]:
    def share(found: Found, setting: str, dimension: str | None = None) -> float:
        """Return the percentage of the bytes that are sent without coding."""

        def nbytes(name: str) -> int:
            sent: dict[str, int] = TRAINED.form(found, name)["bytes"]
            return sum(sent.values()) if dimension is None else sent[dimension]

        return nbytes(setting) / nbytes("off")

    return [
        TRAINED.loss(PAPER, "figure 17", "2D, SDP4Bit and TahQuant: 2.6760 of 2.6631", 0.49, "2D"),
        TRAINED.loss(PAPER, "figure 17", "3D, TACO besides: 2.6799 of 2.6631", 0.63, "taco-3d"),
        TRAINED.loss(
            PAPER, "figure 17", "3D over 2D: 2.6799 of 2.6760", 0.14, "taco-3d", base="2D"
        ),
        TRAINED.order(
            PAPER,
            "ours",
            "balanced-3d loses no more than taco-3d, or 0.1 % at most",
            lambda found: TRAINED.percent(found, "balanced-3d", "taco-3d") < 0.1,
        ),
        TRAINED.order(
            PAPER,
            "ours",
            "balanced-3d sends no more bytes than taco-3d",
            lambda found: share(found, "balanced-3d") <= share(found, "taco-3d"),
        ),
        *(
            Claim(
                paper=PAPER,
                where="table 3",
                text=f"GPT of {size}: {base} TFLOPS, times {two} in 2D and {three} in 3D",
                why_not="needs the paper's GPUs",
            )
            for size, (base, two, three) in THROUGHPUT.items()
        ),
    ]
