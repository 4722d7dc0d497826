"""vLLM's entry point for plugins, on configurations like vLLM's."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

from commpass.errors import PolicyError
from commpass.parallel import vllm
from commpass.parallel.vllm import SLOT, CollectivePass, plugin

VARIABLE = "COMMPASS_POLICY"


def configuration(
    additional=None,
    world_size=2,
    mode="VLLM_COMPILE",
    backend="inductor",
    endpoints=(2048,),
    **fused,
):
    """Return what the plugin reads of a ``VllmConfig``."""
    return SimpleNamespace(
        additional_config=additional if additional is not None else {},
        model_config=object(),
        parallel_config=SimpleNamespace(world_size=world_size),
        compilation_config=SimpleNamespace(
            inductor_compile_config={},
            mode=SimpleNamespace(name=mode),
            backend=backend,
            pass_config=SimpleNamespace(**fused),
            compile_ranges_endpoints=list(endpoints),
        ),
    )


def given(config) -> CollectivePass | None:
    return config.compilation_config.inductor_compile_config.get(SLOT)


def test_vllm_finds_the_plugin():
    [found] = [
        each for each in entry_points(group="vllm.general_plugins") if "commpass" in each.name
    ]
    assert found.load() is plugin.register


def test_configurations_have_the_pass_once_and_only_if_it_is_asked_for(monkeypatch):
    class VllmConfig:
        def __init__(self):
            vars(self).update(vars(configuration()))
            self.__post_init__()

        def __post_init__(self):
            self.initialized = True

    module = ModuleType("vllm.config")
    module.VllmConfig = VllmConfig
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", module)
    monkeypatch.delenv(VARIABLE, raising=False)
    plugin.register()
    plugin.register()
    plain = VllmConfig()
    assert plain.initialized
    assert given(plain) is None
    monkeypatch.setenv(VARIABLE, "balanced")
    config = VllmConfig()
    own = given(config)
    assert own.policy.name == "balanced"
    config.__post_init__()  # vLLM copies configurations
    assert given(config) is own


@pytest.mark.parametrize("value", ["balanced", {"policy": "balanced"}])
def test_option_of_the_configuration_gives_the_policy(value, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    config = configuration({"commpass": value})
    plugin.configure(config)
    assert given(config).policy.name == "balanced"


def test_profile_and_strict_are_options_too(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    options = {"policy": "lossless", "profile": "ethernet-1g", "strict": True}
    config = configuration({"commpass": options})
    plugin.configure(config)
    assert (given(config).profile.name, given(config).strict) == ("ethernet-1g", True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"polcy": "balanced"}, "no option 'polcy'.*policy"),
        ({"policy": "balancd"}, "balanced"),
        (["balanced"], "is a list: write"),
    ],
)
def test_wrong_options_say_what_to_write(value, message, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(PolicyError, match=message):
        plugin.configure(configuration({"commpass": value}))


def test_unknown_option_lists_the_options_once(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(PolicyError) as told:
        plugin.configure(configuration({"commpass": {"polcy": "balanced"}}))
    assert str(told.value).count("profile") == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"world_size": 1}, "one rank"),
        ({"mode": "NONE"}, "does not compile"),
        ({"mode": "STOCK_TORCH_COMPILE"}, "no slot"),
        ({"backend": "eager"}, "'eager'"),
    ],
)
def test_vllm_that_has_nothing_to_compress_is_left_alone_with_the_reason(
    how, message, monkeypatch, caplog
):
    monkeypatch.setenv(VARIABLE, "balanced")
    config = configuration(**how)
    with caplog.at_level(logging.INFO, "commpass"):
        plugin.configure(config)
    assert given(config) is None
    assert message in caplog.text


def test_fusions_that_leave_no_collective_are_switched_off(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "balanced")
    config = configuration(fuse_allreduce_rms=True, fuse_norm_quant=True)
    with caplog.at_level(logging.INFO, "commpass"):
        plugin.configure(config)
    passes = config.compilation_config.pass_config
    assert (passes.fuse_allreduce_rms, passes.fuse_norm_quant) == (False, True)
    assert "fuse_allreduce_rms" in caplog.text


@pytest.mark.parametrize(
    ("options", "endpoints", "expected"),
    [
        ({"policy": "balanced"}, [2048], [22, 2048]),
        ({"policy": "balanced"}, [256, 2048], [22, 256, 2048]),
        ({"policy": "balanced"}, [16], [16]),  # no step has more tokens
        ({"policy": "balanced", "tokens": 512}, [2048], [2048]),
        ({"policy": "balanced", "tokens": [512, 8, 64]}, [2048], [22, 181, 2048]),
        ({"policy": "balanced", "tokens": [1, 2]}, [2048], [2048]),  # vLLM refuses an end of 1
        ({"policy": "off"}, [2048], [2048]),
        ({"policy": "balanced"}, [], []),
    ],
)
def test_vllm_compiles_a_graph_for_each_number_of_tokens(options, endpoints, expected, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    config = configuration({"commpass": options}, endpoints=endpoints)
    plugin.configure(config)
    assert config.compilation_config.compile_ranges_endpoints == expected


def test_vllm_that_compiles_once_has_one_graph_and_says_for_which_tokens(monkeypatch, caplog):
    monkeypatch.delenv(VARIABLE, raising=False)
    config = configuration({"commpass": "balanced"}, mode="DYNAMO_TRACE_ONCE")
    with caplog.at_level(logging.INFO, "commpass"):
        plugin.configure(config)
    assert given(config).tokens == (1, 512)
    assert config.compilation_config.compile_ranges_endpoints == [2048]
    assert "one graph" in caplog.text
    assert "tokens=[1, 512]" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "commpass"):
        plugin.configure(configuration({"commpass": {"tokens": 8}}, mode="DYNAMO_TRACE_ONCE"))
    assert "one graph" not in caplog.text  # as the caller wants it


def test_pass_that_a_program_gives_has_ranges_and_no_fusions_too(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    own = vllm.CollectivePass("balanced")  # the present class: another test loads the module anew
    config = configuration(fuse_allreduce_rms=True)
    config.compilation_config.inductor_compile_config[SLOT] = own
    plugin.configure(config)
    assert given(config) is own
    assert config.compilation_config.compile_ranges_endpoints == [22, 2048]
    assert not config.compilation_config.pass_config.fuse_allreduce_rms


def test_pass_of_another_kind_stays_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.delenv(VARIABLE, raising=False)
    config, other = configuration(), object()
    config.compilation_config.inductor_compile_config[SLOT] = other
    plugin.configure(config)
    assert not caplog.text
    monkeypatch.setenv(VARIABLE, "balanced")
    plugin.configure(config)
    assert given(config) is other
    assert "nothing is compressed" in caplog.text


def test_version_of_vllm_without_ranges_has_one_graph(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    config = configuration({"commpass": "balanced"})
    del config.compilation_config.compile_ranges_endpoints
    plugin.configure(config)
    assert given(config).tokens == (1, 512)
