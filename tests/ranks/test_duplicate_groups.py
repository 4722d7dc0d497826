"""Second process groups of the same ranks, that integrations make and close."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch.distributed as dist

from commpass.groups import duplicate

pytestmark = pytest.mark.xdist_group("ranks")


def connected_and_returned() -> tuple[float, float]:
    """Return when this rank was connected, and when it went on; the last rank connects late."""
    connect, connected = dist.new_group, []

    def connect_late(*args, **options):
        made = connect(*args, **options)
        time.sleep(0.5 * dist.get_rank())
        connected.append(time.monotonic())
        return made

    with mock.patch.object(dist, "new_group", connect_late):
        made = duplicate(dist.group.WORLD)
    returned = time.monotonic()
    dist.destroy_process_group(made)  # without a wait for the other
    return connected[0], returned


def test_rank_goes_on_with_a_second_group_only_when_all_are_connected(ranks2):
    times = ranks2.run(connected_and_returned)
    assert min(returned for _, returned in times) >= max(connected for connected, _ in times)
