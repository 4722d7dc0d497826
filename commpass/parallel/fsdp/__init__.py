"""FSDP2: gathers of parameters and sums of gradients under one policy."""

from commpass.distributed.integration import Sent
from commpass.parallel.fsdp.api import CompressedFSDP, compress_fsdp
from commpass.utils.deprecated import old_names

__all__ = ["CompressedFSDP", "Sent", "compress_fsdp"]

__getattr__ = old_names(__name__, {"FSDPDoor": "CompressedFSDP"})
