"""Folders like Linux's ``/sys/class`` for tests: interfaces and InfiniBand adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def add_interface(
    root: Path,
    name: str,
    speed: str | None = None,
    *,
    device: bool = True,
    below: Sequence[str] = (),
    ports: Sequence[str] = (),
    devtype: str = "",
    folders: Sequence[str] = (),
    operstate: str = "up",
) -> Path:
    """Add an interface and return the folder of the tree.

    ``device``: it is hardware. ``below``: the interfaces that it sends over; ``ports`` are those of
    a bridge. ``folders`` are further entries, such as ``wireless``.
    """
    folder = root / "class/net" / name
    folder.mkdir(parents=True)
    if speed is not None:
        (folder / "speed").write_text(f"{speed}\n")
    (folder / "operstate").write_text(f"{operstate}\n")
    kind = f"DEVTYPE={devtype}\n" if devtype else ""
    (folder / "uevent").write_text(f"{kind}INTERFACE={name}\nIFINDEX=2\n")
    made = [*(["device"] if device else []), *folders, *(f"lower_{each}" for each in below)]
    if ports:
        made += ["bridge", *(f"brif/{each}" for each in ports)]
    for each in made:
        (folder / each).mkdir(parents=True)
    return root


def add_adapter(
    root: Path,
    name: str,
    rates: Mapping[int, str],
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "InfiniBand",
    device: bool = True,
) -> Path:
    """Add an InfiniBand adapter with these rates by port, and return the folder of the tree."""
    adapter = root / "class/infiniband" / name
    if device:
        (adapter / "device").mkdir(parents=True)
    for number, rate in rates.items():
        port = adapter / "ports" / str(number)
        port.mkdir(parents=True)
        for file, text in (("rate", rate), ("state", state), ("link_layer", link_layer)):
            (port / file).write_text(f"{text}\n")
    return root
