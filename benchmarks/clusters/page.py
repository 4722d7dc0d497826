"""Write ``docs/clusters.md`` from the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commpass.report.simulate import millis

TEXT = """# Predictions for clusters

This page is for users who plan a large training and ask what compression may gain there. **Nothing
on it was measured.** It has predictions for Llama-like models and a mixture of experts on 8 to
100,000 GPUs of [named machines](costmodel.md#named-machines):

```
python -m benchmarks.clusters
```

The command took {seconds} s of two cores ({date}, torch {torch}). It writes
`benchmarks/results/clusters.json` and this page.

In the picture, the dark part of a bar is the time in which a rank waits for exchanges (*exposed*
time):

![Predicted time of a training step by policy, relative to off](clusters.png)

In the table, each cell has the milliseconds of a step, and in parentheses those in which a rank
waits. In a mesh, `tp` is tensor parallelism, `dp` data parallelism, `pp` pipeline stages and `ep`
experts. `off` is uncompressed and in the program's order. `lossless` moves exchanges, `balanced`
uses 8 to 6 bits and `aggressive` 4 bits.

{table}

* On hosts with NVLink and a port for each GPU, `lossless` has most of what can be gained for dense
  models. The exchanges of tensor parallelism stay inside a host, and those of gradients overlap
  with backward.
* On hosts with PCIe, and for experts on several hosts, exchanges take a large part of the step.
  Fewer bits gain most there.
* Fewer bits change the time of a step by {most:+.1f} % to {least:+.1f} %, compared with `lossless`.
  An encode occupies the GPU. Uncompressed chunks, which overlap with matmuls, may therefore be as
  fast as a codec.
* The number of GPUs changes little for the same model on the same machines. The exchange of
  gradients grows slowly with the number of replicas, and happens once in a step.

## How it is computed

* **The models** have the sizes of Llama 3 8B, 70B and 405B. The mixture of experts has 235 billion
  parameters (94 layers, 128 experts of width 1,536, 8 for each token). Weights and activations are
  bfloat16. Gradients are accumulated and averaged in float32. A micro-batch is a sequence of 8,192
  tokens, or of 4,096 for the mixture.
* **The meshes** are in the table, and the last dimension has consecutive ranks. Tensor parallelism
  (`tp`) takes the 8 GPUs of a host. The mixture has experts on 64 GPUs (`ep`) instead. Pipeline
  stages (`pp`) are as many as the memory of the GPUs needs. Every data-parallel replica (`dp`) has
  the same number of micro-batches, so larger clusters train larger batches.
* **Two layers** and one micro-batch are simulated, forward and backward, with
  [`commpass.simulate`][simulate] on the mesh of one replica. The exchanges of `tp` and `ep` are in
  that graph. `more_memory` is 1, since a layer is a small part of the memory of a stage. Half of
  the time is that of a layer. It is multiplied by the layers of the longest stage.
* **Gradients** of a layer are averaged by all_reduces over all replicas. Their codecs and times are
  those that the cost model chooses for each weight. They overlap with backward of the layers below,
  two thirds of the time of a layer. This holds for every policy: `off` is a program with such
  overlap, as of DDP.
* **The pipeline** is 1F1B: m micro-batches take the time of m + p - 1 on p stages. Each stage sends
  its activations and their gradients uncompressed, without overlap.

**Two layers instead of all.** A model of {layers} small layers ({mesh} on `{machine}`) was also
simulated as a whole. A micro-batch without averages differs by at most {off_micro:.1f} % from
{layers} times the time of a layer. The last micro-batch, whose gradients are averaged, is nearly
all communication there. It differs by at most {off_last:.0f} %:

{whole}

[simulate]: costmodel.md#simulating-a-cluster-commpass-simulate

## What is not modelled

* Embeddings, the output layer, the optimizer, data loading, checkpoints and failures.
* Memory: whether a model fits, and recomputation of activations.
* Switches: the network has its full rate between any two hosts, without congestion or
  [oversubscription](costmodel.md#named-machines).
* Ranks that are late, and other jobs on the network.
* Uneven routing: all experts get equally many tokens.
* The number of messages in an all_to_all of very many ranks. It has the start-up time of one
  message, so codecs that exchange by all_to_all over thousands of ranks are predicted too fast.
* The effect of a codec on the loss ([calibration](calibration.md) measures it).
* Kernels of the codecs on GPUs other than an H100 or H200
  ([named profiles](costmodel.md#named-profiles)).

To predict a step of your own model on such machines, use [`commpass simulate`][simulate].
"""


def page(found: dict[str, Any]) -> str:
    """Return the page with the tables of these results."""
    whole = found["whole"]
    policies = whole["policies"].values()
    changes = [
        100 * (by_name[name]["step_ms"] / by_name["lossless"]["step_ms"] - 1)
        for by_name in (row["policies"] for row in found["rows"])
        for name in by_name
        if name not in ("off", "lossless")
    ]
    return TEXT.format(
        seconds=found["seconds"],
        date=found["date"],
        torch=found["torch"],
        table="\n".join(table(found["rows"])),
        layers=whole["layers"],
        mesh=whole["mesh_text"],
        machine=whole["machine"],
        off_micro=max(difference(each, "by_layers_ms", "micro_batch_ms") for each in policies),
        least=max(changes),
        most=min(changes),
        off_last=max(difference(each, "last_by_layers_ms", "last_ms") for each in policies),
        whole="\n".join(whole_table(whole)),
    )


def difference(times: dict[str, float], name: str, of: str) -> float:
    """Return by how many percent one time differs from another."""
    return 100 * abs(times[name] / times[of] - 1)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of steps."""
    policies = list(rows[0]["policies"])
    yield (
        "| model | machine | GPUs | mesh | micro-batches | "
        + " | ".join(f"`{name}`" for name in policies)
        + " |"
    )
    yield "|---|---|---|---|---|" + "---|" * len(policies)
    for row in rows:
        times = (
            f"{millis(each['step_ms'])} ({millis(each['exposed_ms'])})"
            for each in row["policies"].values()
        )
        yield (
            f"| {row['model']} | `{row['machine']}` | {row['gpus']:,} | {row['mesh_text']} |"
            f" {row['micro_batches']} | {' | '.join(times)} |"
        )


def whole_table(whole: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of the small model."""
    yield "| policy | micro-batch: whole | by one layer | last micro-batch: whole | by one layer |"
    yield "|---|---|---|---|---|"
    for name, each in whole["policies"].items():
        keys = ("micro_batch_ms", "by_layers_ms", "last_ms", "last_by_layers_ms")
        yield f"| `{name}` | " + " | ".join(f"{millis(each[key])} ms" for key in keys) + " |"
