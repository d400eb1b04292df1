"""The thread that notices that ranks wait for each other, without processes: many ranks share a store."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fsdp2_strategy.distributed import unit_watcher
from fsdp2_strategy.distributed.unit_watcher import PublishedLog


class Store:
    """A store that counts requests."""

    def __init__(self):
        self.inner, self.requests = dist.HashStore(), Counter()

    def __getattr__(self, name):
        self.requests[name] += 1
        return getattr(self.inner, name)


class Log:
    name, is_releasing = "log", False

    def __init__(self, own, ranks, entries, call="barrier"):
        self.own, self.ranks, self.entries, self.call = own, list(range(ranks)), entries, call

    def look(self):
        return len(self.entries), self.call is not None

    def to_publish(self):
        return PublishedLog(0, len(self.entries), 0, list(self.entries), {}, self.call, None)

    def difference(self, logs):
        lengths = [len(log.entries) for log in logs.values()]
        same = all(
            len({log.entries[i] for log in logs.values() if i < len(log.entries)}) == 1 for i in range(max(lengths))
        )
        return None if same else "they differ"


@pytest.fixture
def found():
    """Messages with which the ranks broke off."""
    messages = []
    with (
        patch.object(unit_watcher, "reported_divergence", lambda wait: None),
        patch.object(unit_watcher, "_break_off", messages.append),
    ):
        yield messages


class Watchers:
    def __init__(self, logs):
        self.logs = logs
        self.store = Store()
        self.publishers, self.reader = [unit_watcher._Publisher() for _ in logs], unit_watcher._Reader()

    def look(self, ranks=None):
        for rank in range(len(self.logs)) if ranks is None else ranks:
            self.publishers[rank].publish(self.store, self.logs[rank], self.logs[rank].look())
        self.reader.compare(self.store, self.logs[0])


def test_ranks_that_wait_send_few_requests_while_nothing_changes(found):
    watchers = Watchers([Log(rank, 1000, [1, 2]) for rank in range(1000)])
    watchers.look()
    watchers.store.requests.clear()
    watchers.look(range(999))  # the last rank is slow
    assert watchers.store.requests == {"add": 999 + 1}
    assert not found


def test_logs_that_differ_are_found_even_if_no_rank_waits(found):
    watchers = Watchers([Log(0, 3, [1], call=None), Log(1, 3, [1, 2], call=None), Log(2, 3, [1, 3], call=None)])
    watchers.look([0, 1])
    assert not found
    watchers.look()
    assert found == ["they differ"]


def test_all_ranks_must_answer_that_they_still_wait(found):
    logs = [Log(0, 2, [1]), Log(1, 2, [1, 2])]
    watchers = Watchers(logs)
    watchers.look()
    logs[0].entries.append(2)  # rank 0 only was slow, and rank 1 still waits for it
    for _ in range(3):
        watchers.look([1])
    assert not found
    logs[0].entries.append(3)
    watchers.look()
    watchers.look()
    assert len(found) == 1 and "rank 0 waits in barrier, rank 1 waits in barrier" in found[0]


def test_a_rank_that_does_something_else_is_not_waiting(found):
    watchers = Watchers([Log(0, 2, [1], call=None), Log(1, 2, [1, 2])])
    for _ in range(4):
        watchers.look()
    assert not found
