"""One line for each codec: its purpose, and the paper that it is from."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

DESCRIPTIONS = {
    "cast": "a 16-bit float: what every framework has; half of the bytes of float32",
    "bf16": "cast to bfloat16",
    "fp16": "cast to float16",
    "int8": "plain integers over the largest value of each block: cheap, and near to exact",
    "int6": "as int8 with 6 bits: where 8 are more than the error asks for",
    "int4": "as int8 with 4 bits: large error on data with outliers",
    "int2": "as int8 with 2 bits: for comparison",
    "fp8": "an 8-bit float: one error for small and for large values (e5m2: for wider ranges)",
    "mxfp8": "an 8-bit float over a power of two for 32 values (OCP MX): where matmuls take it",
    "mxfp6": "as mxfp8 with 6 bits: the error of 8 bits, where the format is asked for",
    "mxfp4": "as mxfp8 with 4 bits: where matmuls take it",
    "nvfp4": "a 4-bit float over an 8-bit one for 16 values: where matmuls take it; less error than"
    " int4 and mxfp4",
    "rotated": "integers after a Hadamard rotation, which spreads outliers: least error for its"
    " bytes from 4 bits on",
    "table": "Lloyd-Max levels after a rotation: least error at 2 and 3 bits",
    "taco": "rotated fp8 with two scales (TACO): activations and gradients of tensor parallelism",
    "equarx": "int8 in blocks of 8 x 128 (EQuARX): all_reduce of inference, pipelined",
    "sdp4bit": "4 bits in groups, rotated (SDP4Bit): gradients and weights of sharded data"
    " parallelism",
    "tahquant": "3 to 4 bits a tile of channels, with a pivot swap (TahQuant): activations of"
    " pipeline parallelism",
    "exponent": "lossless: exponents in 3 bits with escapes (ZipCCL): where no error is allowed",
    "outlier": "the features of widest range in bf16, the others in int4 (Low-bit tensor"
    " parallelism): inference, calibrated",
    "difference": "the change against what receivers hold (SDP4Bit): weights that are gathered"
    " each step",
    "mixed": "4 bits for four tokens of five, 3 for the others (TahQuant), or any two codecs",
    "topk": "the largest values alone, exactly, with error feedback: gradients of data parallelism",
    "randomk": "values chosen at random, with error feedback: for comparison",
    "dgc": "about the largest values, by a sampled threshold (Deep Gradient Compression)",
    "gaussiank": "about the largest values, by the threshold of a Gaussian (Gaussian-k)",
    "redsync": "about the largest values, by a threshold that is bisected (RedSync)",
    "sidco": "about the largest values, by a threshold fitted in stages (SIDCo)",
    "segments": "tensors of a fusion buffer, each selected from on its own (SSFusion)",
    "raw": "the values as they are",
}
"""Maps the name of a codec, without parameters, to its line."""


def descriptions_of(specs: Iterable[str]) -> Table:
    """Return the lines of some codecs, one for each name."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in dict.fromkeys(spec.partition("(")[0] for spec in specs):
        if name in DESCRIPTIONS:
            table.add_row(Text(name), Text(DESCRIPTIONS[name]))
    return table
