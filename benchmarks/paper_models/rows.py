"""Numbers of four papers, each with the cost model's prediction and its assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from commpass.costmodel import Link
from commpass.costmodel.cards import CARDS

from . import equarx, ssfusion, taco, zipccl
from .hops import HOP_US
from .sites import fused, plain

GOAL = 0.15
Number = float | str


@dataclass(frozen=True)
class Row:
    """A number of a paper and its prediction; for a choice, both are names.

    A ``speedup`` compares doing something with not doing it.
    """

    paper: str
    what: str
    number: Number
    predicted: Number
    assumed: str
    fitted: bool = False
    speedup: bool = False

    @property
    def ratio(self) -> float | None:
        """Return the prediction over the paper's number; None for a choice."""
        if isinstance(self.number, str) or isinstance(self.predicted, str):
            return None
        return self.predicted / self.number

    @property
    def of_gain(self) -> float | None:
        """Return the predicted share of a speedup or a loss; 0 if none is predicted."""
        if not self.speedup or self.ratio is None:
            return None
        return (float(self.predicted) - 1) / (float(self.number) - 1)

    @property
    def met(self) -> bool:
        """Return whether the prediction is within the goal; for a choice, whether it is the
        same."""
        if self.ratio is None:
            return self.number == self.predicted
        return abs(self.ratio - 1) <= GOAL


@dataclass(frozen=True)
class Summary:
    """The number of rows without fitted parameters, and how many of them meet the goal."""

    predicted: int
    met: int
    fitted: int


def summary(rows: list[Row]) -> Summary:
    free = [row for row in rows if not row.fitted]
    return Summary(len(free), sum(row.met for row in free), len(rows) - len(free))


# --- TACO -----------------------------------------------------------------------------------------

BASELINE = {2: 134.9, 4: 63.7, 8: 31.3}  # TFLOPS, section 5.4.2
GAINS = {2: 1.29, 4: 1.70, 8: 1.87}  # section 5.4.1
UNFUSED = {2: 0.73, 4: 0.86, 8: 0.70}  # section 5.4.2
H100 = CARDS["h100"]
GPT = taco.TensorParallel()
TACO, TACO_FIT = "TACO", ((2, BASELINE[2]), (4, BASELINE[4]))


def machine(model: taco.TensorParallel = GPT) -> taco.Fitted:
    return taco.fit_step(model, TACO_FIT, HOP_US["nvlink-4"])


def taco_rows() -> list[Row]:
    found = machine()
    link = (
        f"compute and link ({found.link.gbytes_per_s:.1f} GB/s) from the baselines at TP 2 and 4;"
        f" {GPT.tokens:,} tokens a micro-batch; nothing overlaps"
    )
    rows = []
    for ranks, tflops in BASELINE.items():
        without = found.step_us(GPT, ranks, plain(GPT.sum_of(ranks), found.link))
        fit = ranks in dict(TACO_FIT)
        predicted = GPT.tflops(ranks, without)
        rows.append(Row(TACO, f"TFLOPS without, TP {ranks}", tflops, predicted, link, fit))
    for ranks, number in GAINS.items():
        gain = taco.taco_gain(GPT, found, ranks, H100)
        how = f"{link}; one kernel each way at half of an H100's bandwidth"
        rows.append(Row(TACO, f"throughput, TP {ranks}", number, gain, how, speedup=True))
    for ranks, number in UNFUSED.items():
        gain = taco.unfused_gain(GPT, found, ranks, H100)
        how = f"{link}; each operator of commpass's codec a kernel, 5 us to launch"
        rows.append(Row(TACO, f"unfused, TP {ranks}", number, gain, how, speedup=True))
    return rows


# --- ZipCCL ---------------------------------------------------------------------------------------

ZIP = "ZipCCL"
SWITCHED = {
    (1, 8): "native",
    (2, 8): "native",
    (4, 8): "native",
    (8, 8): "native",
    (8, 1): "native",
    (8, 2): "zipped",
    (8, 4): "zipped",
}
"""Hosts and GPUs per host, to what is chosen. Section 6.5 names those in which switching gains
nothing. We read this as relative to always coding: on 64, the library's is faster (6.3)."""
CLUSTER = zipccl.hosts_link(8, 8)
A6000 = fused(zipccl.A6000, zipccl.ZIPPED)


def zipccl_rows() -> list[Row]:
    layer = zipccl.zipped_gain("all_gather", zipccl.LLAMA_MIB, 64, CLUSTER, A6000)
    tokens = zipccl.zipped_gain("all_to_all", zipccl.QWEN_MIB, 64, CLUSTER, A6000)
    host = "one 200 Gbit/s port a host, 11 GB/s from GPU to GPU in it, two sockets"
    card = f"A6000s, {host}; kernels at half bandwidth"
    gather = f"a layer of Llama3-8B; a Gaussian's bytes; {card}"
    scatter = f"a layer of Qwen3-MoE's tokens; a Gaussian's bytes; {card}"
    before, after, reduce = zipccl.layer_us(64, CLUSTER, A6000)
    step = [zipccl.fsdp_step_us(us, reduce, A6000) for us in (before, after)]
    whole = f"all_gathers of bf16, the library's reduce_scatter of fp32, one layer ahead; {card}"
    rows = [
        Row(ZIP, "Llama3-8B end to end, 64 GPUs", 1.18, step[0] / step[1], whole, speedup=True),
        Row(ZIP, "all_gather, Llama3-8B", 1.35, layer, gather, speedup=True),
        Row(
            ZIP,
            "all_gather, mean of volumes",
            1.31,
            layer,
            f"at one volume: {gather}",
            speedup=True,
        ),
        Row(
            ZIP,
            "all_to_all, mean of volumes",
            1.36,
            tokens,
            f"at one volume: {scatter}",
            speedup=True,
        ),
    ]
    for (hosts, gpus), number in SWITCHED.items():
        what = f"reduce_scatter, {hosts} x {gpus} GPUs"
        link = zipccl.hosts_link(hosts, gpus)
        chosen = zipccl.switched(link, hosts * gpus, A6000)
        how = f"native: fp32 in a ring; zipped: bf16 in 12.03 bits, if that gains 10 %; {card}"
        rows.append(Row(ZIP, what, number, chosen, how))
    return rows


# --- EQuARX ---------------------------------------------------------------------------------------

EQ, CHIPS, MIB, CROSSOVER = "EQuARX", 8, 16, 2.0


def equarx_rows() -> list[Row]:
    return equarx_of(CHIPS, equarx.HOP_US, 0.0)


def equarx_of(chips: int, hop_us: float, launch_us: float, *, fit: bool = False) -> list[Row]:
    link, how = equarx.ring_link(hop_us), equarx.kernels(launch_us)
    said = (
        f"{chips} chips in a ring, {link.gbytes_per_s:g} GB/s both ways; {hop_us:g} us a hop,"
        f" {launch_us:.2f} a step of the pipeline{' (fitted to 2 MiB)' if fit else ''}"
    )
    gain, from_mib = equarx.best_gain(MIB, chips, link, how), equarx.crossover_mib(chips, link, how)
    return [
        Row(EQ, f"all_reduce of {MIB} MiB", 1.8, gain, said, speedup=True),
        Row(EQ, "MiB from which it gains", CROSSOVER, from_mib, f"gains a tenth; {said}", fit),
    ]


# --- SSFusion -------------------------------------------------------------------------------------

SS = "SSFusion"
GATHERED = ((1.24, 12.02), (2.96, 28.09))  # seconds on 8 and 64 GPUs, section IV.D
REDUCED = ((0.15, 0.35), (0.52, 0.91))
MODELS = (("BERT-large", ssfusion.BERT_LARGE), ("GPT2-large", ssfusion.GPT2_LARGE))


def ssfusion_rows() -> list[Row]:
    link = ssfusion.fit_alpha(ssfusion.BERT_LARGE, REDUCED[0][1] / REDUCED[0][0])
    how = (
        f"models are those two by their sizes; each tensor by itself at {link.gbytes_per_s:g} GB/s;"
        f" start-up {link.alpha_us:.1f} us from the first all_reduce's growth"
    )
    return grown(link, MODELS, how, fit=True)


def grown(
    link: Link,
    models: tuple[tuple[str, ssfusion.Gradients], ...],
    how: str,
    *,
    fit: bool = False,
) -> list[Row]:
    rows = []
    for kind, times in (("all_gather", GATHERED), ("all_reduce", REDUCED)):
        for number, ((name, of), (few, many)) in enumerate(zip(models, times, strict=True)):
            what = f"{kind}, 8 to 64 ranks, {name}"
            fitted = fit and kind == "all_reduce" and number == 0
            rows.append(Row(SS, what, many / few, ssfusion.growth(kind, of, link), how, fitted))
    return rows


def all_rows() -> list[Row]:
    """Return every number, paper by paper."""
    return [*taco_rows(), *zipccl_rows(), *equarx_rows(), *ssfusion_rows()]
