"""Pipeline stages: activations and their gradients under one policy."""

from commpass.parallel.pipeline.api import CompressedPipeline, compress_pipeline

__all__ = ["CompressedPipeline", "compress_pipeline"]
