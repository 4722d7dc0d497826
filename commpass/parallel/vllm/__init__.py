"""vLLM: compress the collectives of the models that it serves.

===================  ========================================================================
``plugin``           vLLM's entry point for plugins: ``COMMPASS_POLICY=balanced vllm serve``
``collective_pass``  the pass, which the plugin adds to vLLM's configuration
``branches``         one graph with a branch for each number of tokens
``operators``        vLLM's own collective operators as functional collectives
===================  ========================================================================

``CollectivePass`` and ``SLOT`` are imported on first access, since vLLM loads the plugin in
processes that do not need them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commpass.parallel.vllm.branches import SLOT
    from commpass.parallel.vllm.collective_pass import CollectivePass

__all__ = ["SLOT", "CollectivePass"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from commpass.parallel.vllm import branches, collective_pass

        return branches.SLOT if name == "SLOT" else collective_pass.CollectivePass
