"""DistributedDataParallel: gradients under one policy."""

from commpass.distributed.integration import Bytes
from commpass.parallel.ddp.api import CompressedDDP, compress_ddp
from commpass.utils.deprecated import old_names

__all__ = ["Bytes", "CompressedDDP", "compress_ddp"]

__getattr__ = old_names(__name__, {"DDPDoor": "CompressedDDP"})
