"""vLLM's entry point for plugins: compress what it sends, without a line of the user's.

    COMMPASS_POLICY=balanced vllm serve MODEL --tensor-parallel-size 2
    vllm serve MODEL --tensor-parallel-size 2 \\
        --additional-config '{"commpass": {"policy": "balanced"}}'

vLLM calls ``register`` in each of its processes. Without the variable and the option nothing
changes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commpass.distributed.environment import policy_of_environment
from commpass.errors import PolicyError, nearest

log = logging.getLogger("commpass")

KEY = "commpass"
"""The key in vLLM's ``additional_config``."""
OPTIONS = ("policy", "profile", "tokens", "strict")
FUSED_BY_VLLM = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
"""vLLM's own passes after which there is no collective left to compress."""
ONE_GRAPH = (
    "vLLM compiles one graph for all numbers of tokens here (compilation mode %s): collectives have"
    " branches where the decisions for tokens=%s differ"
)
OTHER_PASS = "nothing is compressed: inductor_compile_config[%r] has a pass of another kind, %s"


def register() -> None:
    """Let each configuration of vLLM in this process have the pass, if it or COMMPASS_POLICY asks
    for one."""
    config = importlib.import_module("vllm.config").VllmConfig
    if not hasattr(config.__post_init__, KEY):
        config.__post_init__ = _with_pass(config.__post_init__)


def _with_pass(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def with_pass(config: Any) -> None:
        post_init(config)
        configure(config)

    setattr(with_pass, KEY, True)
    return with_pass


def configure(config: Any) -> None:
    """Add the pass to a ``VllmConfig`` that asks for it.

    Raise PolicyError for an unknown option, policy or profile.
    """
    from commpass.parallel.vllm.branches import SLOT
    from commpass.parallel.vllm.collective_pass import CollectivePass, log_as_vllm_does

    options, compilation = _options(config), config.compilation_config
    made = compilation.inductor_compile_config.get(SLOT)
    if config.model_config is None or (options is None and made is None):
        return
    log_as_vllm_does()
    if made is None:
        if config.parallel_config.world_size == 1:
            log.info("vLLM runs on one rank: there is nothing to compress")
            return
        if why := _is_not_compiled(compilation):
            log.warning("nothing is compressed: %s", why)
            return
        made = compilation.inductor_compile_config[SLOT] = CollectivePass(**(options or {}))
        if not _has_ranges(compilation) and len(made.tokens) > 1:
            log.info(ONE_GRAPH, getattr(compilation.mode, "name", ""), list(made.tokens))
    elif not isinstance(made, CollectivePass):
        if options is not None:
            log.warning(OTHER_PASS, SLOT, type(made).__name__)
        return
    if made.policy.name != "off":
        split_ranges(compilation, made.tokens)
    for name in FUSED_BY_VLLM:
        if getattr(compilation.pass_config, name, False):
            log.info("vLLM's pass %s is switched off: it leaves no collective to compress", name)
            setattr(compilation.pass_config, name, False)


def _has_ranges(compilation: Any) -> bool:
    return getattr(compilation.mode, "name", "") == "VLLM_COMPILE"


def split_ranges(compilation: Any, tokens: Sequence[int]) -> None:
    """Let vLLM compile one more graph for each further number of tokens.

    A range ends at the geometric mean of two numbers. A version of vLLM without ranges compiles one
    graph, and so does vLLM on CPUs (``branches``).
    """
    present = getattr(compilation, "compile_ranges_endpoints", None)
    if present and _has_ranges(compilation):
        means = {math.isqrt(low * high) for low, high in itertools.pairwise(tokens)}
        inside = {end for end in means if 1 < end < max(present)}
        compilation.compile_ranges_endpoints = sorted({*present, *inside})


def _options(config: Any) -> dict[str, Any] | None:
    """Return the options of the pass; None if there shall be none."""
    additional = config.additional_config
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    policy = policy_of_environment()
    if given is None:
        return None if policy is None else {"policy": policy}
    if isinstance(given, str):
        given = {"policy": given}
    if not isinstance(given, Mapping):
        raise PolicyError(
            f"additional_config[{KEY!r}] is a {type(given).__name__}: write"
            f' {{"{KEY}": {{"policy": "balanced"}}}}'
        )
    for name in given:
        if name not in OPTIONS:
            raise PolicyError(
                f"additional_config[{KEY!r}] has no option {name!r}{nearest(name, OPTIONS)}"
            )
    return dict(given)


def _is_not_compiled(compilation: Any) -> str:
    """Return why vLLM does not compile its model by Inductor; "" if it does."""
    mode = getattr(compilation.mode, "name", "")
    if mode == "NONE":
        return "vLLM does not compile this model (enforce_eager, or a compilation mode of NONE)"
    if mode == "STOCK_TORCH_COMPILE":
        return "vLLM's compilation mode STOCK_TORCH_COMPILE has no slot for passes"
    if compilation.backend not in ("", "inductor"):
        return f"vLLM compiles with {compilation.backend!r}, which has no slot for passes"
    return ""
