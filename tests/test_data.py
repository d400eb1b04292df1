"""A data order that is a formula: every sample exactly once, the same batches on any number of ranks, exact resume."""

from __future__ import annotations

import itertools
import json
import logging
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models import build, tokens
from helpers.training import assert_same, full_state
from helpers.worlds import some, some_rows
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.checkpoint import data_position
from fsdp2_strategy.data import EpisodeOrder, GlobalOrder, MixtureOrder, ResumableLoader
from fsdp2_strategy.data.batches import Anchor, BatchPlan
from fsdp2_strategy.data.sample_fetcher import SampleFetcher
from fsdp2_strategy.data.sampler import ResumableSampler
from fsdp2_strategy.errors import ArgumentError, CheckpointError, CorruptDataError, DataError


class Numbers(Dataset):
    """Sample i is i, with some noise beside it."""

    def __init__(self, n, episodes=None):
        self.n = n
        self.episode_lengths = episodes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        noise = (torch.rand(()).item(), float(np.random.rand()), random.random())  # noqa: NPY002
        return {"i": i, "noise": torch.tensor(noise, dtype=torch.float64)}


def ids(batch):
    return batch["i"].tolist()


def states_of_generators():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


def chi_square(observed, expected):
    """Return by how many standard deviations observed counts are further off than chance has them."""
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), observed.size - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


# --- the order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "is_uneven"), [(1, False), (3, True), (4, False)])
def test_batches_that_ranks_do_not_divide_are_warned_of(ranks, is_uneven, caplog):
    ResumableLoader(Numbers(20), 8, dp_rank=0, dp_size=ranks)
    text = "batches of 8 samples on 3 ranks: some ranks get a sample more than others"
    assert (text in caplog.text) == is_uneven
    caplog.clear()
    ResumableLoader(Numbers(20), 8, dp_rank=0, dp_size=ranks, tail="pad")  # whose mask tells which samples count
    assert text not in caplog.text


def test_an_order_holds_every_sample_once_and_any_slice_is_part_of_it():
    rng = random.Random(0)
    for n in [*range(1, 70), 1000, 65_535, 65_536, 65_537, 65_600, 100_003, 300_000]:
        order = GlobalOrder(n, seed=n, epoch=1)
        whole = order.indices(0, n)
        assert whole.dtype == np.int64 and len(order) == n and np.array_equal(np.sort(whole), np.arange(n))
        for _ in range(5):
            start, stop = sorted(rng.randint(0, n) for _ in range(2))
            assert np.array_equal(order.indices(start, stop), whole[start:stop])
        some = rng.sample(range(n), min(n, 9))
        assert np.array_equal(whole[order.positions(some)], whole[np.sort(np.argsort(whole)[some])])


def test_orders_are_what_they_were_when_runs_began():
    """A run that is resumed after an update must find its order again: these values never change."""
    assert GlobalOrder(10, 0, 0).indices(0, 10).tolist() == GOLDEN["table"]
    assert GlobalOrder(10**12, 7, 3).indices(5 * 10**11, 5 * 10**11 + 4).tolist() == GOLDEN["rounds"]
    episodes = EpisodeOrder([3, 1, 4, 1, 5, 9, 2, 6], 1, 2, 4, lanes=2, batch=6, offset=1)
    assert episodes.indices(0, 12).tolist() == GOLDEN["episodes"]
    assert MixtureOrder([5, 8], [3, 1], 2, 1).indices(0, 13).tolist() == GOLDEN["mixture"]


GOLDEN = {
    "table": [1, 2, 9, 6, 7, 0, 8, 4, 3, 5],
    "rounds": [97971724896, 850085529615, 563597096300, 450583050721],
    "episodes": [16, 15, 14, 23, 24, 19, 17, 20, 5, 4, 30, 1],
    "mixture": [1, 2, 4, 10, 2, 5, 4, 3, 7, 0, 0, 1, 3],
}


def test_a_slice_takes_the_same_memory_at_any_length():
    tracemalloc.start()
    order = GlobalOrder(10**12, 0, 0)
    far = order.indices(10**12 - 4096, 10**12)
    assert tracemalloc.get_traced_memory()[1] < 3 << 20
    tracemalloc.stop()
    assert len(set(far.tolist())) == 4096 and far.max() < 10**12 and far.max() > 9 * 10**11
    assert np.array_equal(order.positions(far), np.arange(10**12 - 4096, 10**12))


def test_positions_and_neighbours_are_uniform():
    small = np.zeros((8, 8))
    for epoch in range(4000):
        small[np.arange(8), GlobalOrder(8, 0, epoch).indices(0, 8)] += 1
    assert chi_square(small, 500) < 4
    for n in (60_000, 200_000):
        order = GlobalOrder(n, 1, 0).indices(0, n)
        cells = (order * 16 // n) + 16 * (np.arange(n) * 16 // n)
        assert chi_square(np.bincount(cells, minlength=256), n / 256) < 4
        pairs = (order[:-1] * 16 // n) + 16 * (order[1:] * 16 // n)
        assert chi_square(np.bincount(pairs, minlength=256), (n - 1) / 256) < 4
        steps = np.diff(order) % n
        assert chi_square(np.bincount(steps * 64 // n, minlength=64), (n - 1) / 64) < 4
        assert abs((steps == 1).mean() - 1 / n) < 1e-4
        other = GlobalOrder(n, 1, 1).indices(0, n)
        both = (order * 16 // n) + 16 * (other * 16 // n)
        assert chi_square(np.bincount(both, minlength=256), n / 256) < 4


def test_wrong_arguments_of_orders_are_errors():
    with pytest.raises(DataError, match="n is 0"):
        GlobalOrder(0)
    with pytest.raises(DataError, match="the slice is 3 to 11"):
        GlobalOrder(10).indices(3, 11)
    with pytest.raises(DataError, match="range from 10 to 10"):
        GlobalOrder(10).positions([10])
    with pytest.raises(DataError, match="expected none below 0 and at least one above 0"):
        EpisodeOrder([0, 0], 0, 0, 2)
    with pytest.raises(DataError, match="lanes 4"):
        EpisodeOrder([3, 4], 0, 0, 2, lanes=4)
    with pytest.raises(DataError, match="cannot mix"):
        MixtureOrder([3, 4], [1.0])


def test_episodes_are_mixed_a_pool_at_a_time_and_lanes_keep_to_their_own():
    rng = random.Random(1)
    for trial in range(150):
        lengths = [rng.randint(0, 30) for _ in range(rng.randint(1, 40))]
        if not (n := sum(lengths)):
            continue
        pool = rng.randint(1, 12)
        lanes = rng.randint(1, pool)
        batch = rng.randint(lanes, 60)
        order = EpisodeOrder(lengths, trial, 2, pool, lanes=lanes, batch=batch, offset=rng.randint(0, batch - 1))
        whole = order.indices(0, n)
        assert np.array_equal(np.sort(whole), np.arange(n))
        start, stop = sorted(rng.randint(0, n) for _ in range(2))
        assert np.array_equal(order.indices(start, stop), whole[start:stop])
        some = rng.sample(range(n), min(n, 5))
        assert np.array_equal(order.positions(some), np.sort(np.argsort(whole)[some]))
        episode_of = np.repeat(np.arange(len(lengths)), lengths)[whole]
        if lanes == 1:  # an episode is open from its first frame to its last
            first, last = np.full(len(lengths), n), np.full(len(lengths), -1)
            np.minimum.at(first, episode_of, np.arange(n))
            np.maximum.at(last, episode_of, np.arange(n))
            assert max(((first <= p) & (last >= p)).sum() for p in range(n)) <= pool
            assert order.episodes_touched(3) == [np.count_nonzero(lengths)] * 3
            continue
        for size in (1, 2, 3):
            touched = [set() for _ in range(size)]
            for at in range(order._head, n - batch + 1, batch):
                for rank in range(size):
                    touched[rank] |= set(episode_of[at + rank * batch // size : at + (rank + 1) * batch // size])
            assert all(len(t) <= most for t, most in zip(touched, order.episodes_touched(size), strict=True))


def test_lanes_let_a_rank_touch_its_share_of_the_episodes():
    lengths = np.full(640, 50)
    mixed = EpisodeOrder(lengths, 0, 0, 64, batch=256)
    lanes = EpisodeOrder(lengths, 0, 0, 64, batch=256, lanes=8)
    assert mixed.episodes_touched(4) == [640] * 4
    assert all(most <= 640 / 4 + 1 for most in lanes.episodes_touched(4))
    batch = lanes.indices(256, 512)
    assert len(set((batch // 50).tolist())) > 50  # and a batch still mixes a whole pool


def test_mixtures_draw_by_weight_and_go_through_each_data_set_in_passes():
    order = MixtureOrder([1000, 10, 90], [1, 1, 2], 0, 0)
    whole = order.indices(0, 1100)
    counts = np.bincount(np.digitize(whole, [1000, 1010]), minlength=3)
    assert counts.tolist() == [275, 275, 550]
    window = np.bincount(np.digitize(whole[100:500], [1000, 1010]), minlength=3)
    assert chi_square(window, np.array([100, 100, 200])) < 4
    drawn = np.concatenate([MixtureOrder([1000, 10, 90], [1, 1, 2], 0, e).indices(0, 1100) for e in range(4)])
    per_sample = np.bincount(drawn, minlength=1100)
    for part in (per_sample[:1000], per_sample[1000:1010], per_sample[1010:]):
        assert part.max() - part.min() <= 1  # passes go on across epochs
    assert np.array_equal(order.indices(300, 700), whole[300:700])
    assert np.array_equal(order.positions([1003, 5]), np.flatnonzero(np.isin(whole, [1003, 5])))


# --- batches ---------------------------------------------------------------------------------------------------------


def naive_batches(n, batch, tail, order_of, events, count):
    """Make batches by keeping lists: the epochs' samples one after the other, less what is skipped by then."""
    made, epoch, skipped = [], 0, set()
    rest = order_of(0).indices(0, n).tolist()
    while len(made) < count:
        if len(made) in events:
            skipped |= events[len(made)]
            rest = [s for s in rest if s not in skipped]
        got = []
        if not rest or (tail == "drop" and len(rest) < batch):
            rest = []
        while len(got) < batch:
            if not rest:
                if got and tail != "carry":
                    break
                epoch += 1
                rest = [s for s in order_of(epoch).indices(0, n).tolist() if s not in skipped]
                continue
            got.append((epoch, rest.pop(0)))
        made.append(got)
    return made


def test_batches_equal_those_of_lists_whatever_is_skipped_and_however_epochs_end():
    rng = random.Random(2)
    for trial in range(120):
        n, tail = rng.randint(1, 40), rng.choice(["carry", "pad", "drop"])
        batch = rng.randint(1, n // 2 + 1 if tail == "drop" else 50)
        count = rng.randint(1, 40)
        keep = batch if tail == "drop" else 1
        candidates = rng.sample(range(n), rng.randint(0, max(0, min(n - keep, 6))))
        events = {}
        for sample in candidates:
            events.setdefault(rng.randint(0, count), set()).add(sample)
        plan = BatchPlan(lambda epoch, n=n, trial=trial: GlobalOrder(n, trial, epoch), batch, tail)
        expected = naive_batches(n, batch, tail, plan.order_of, events, count)
        for number in range(count):
            if number in events:
                anchor = Anchor(number, *plan.position_of(number))
                plan = BatchPlan(plan.order_of, batch, tail, sorted({*plan.skipped, *events[number]}), anchor)
            got = [(span.epoch, sample) for span in plan.spans(number) for sample in plan.samples(span).tolist()]
            assert got == expected[number], (trial, number)
            epoch = plan.epoch_of(number)
            assert epoch == got[0][0] and number < plan.end_of(epoch)
            assert number == 0 or plan.end_of(epoch) > number >= plan.end_of(epoch - 1) or epoch == plan.anchor.epoch
    far = BatchPlan(lambda epoch: GlobalOrder(7, 0, epoch), 3)
    assert far.epoch_of(10**12) == 3 * 10**12 // 7


@pytest.mark.full
@pytest.mark.parametrize("kind", some(["carry", "pad", "drop", "pool", "mixture"], ["mixture"]))
def test_whatever_is_skipped_saved_and_loaded_batches_equal_those_of_lists(kind):
    """Also when samples are skipped twice in a row, until an epoch has none left, and by ranks that come and go."""
    rng = random.Random(kind)
    for trial in range(60):
        n, tail = rng.randint(2, 30), kind if kind in ("pad", "drop") else "carry"
        batch = rng.randint(2, max(2, n // 2))
        options = {"seed": trial, "tail": tail, "global_batch_size": batch}
        dataset, order_of = Numbers(n, [1] * n), lambda epoch: GlobalOrder(n, trial, epoch)  # noqa: B023
        if kind == "pool":
            options["pool"] = rng.randint(1, 5)
            order_of = lambda epoch: EpisodeOrder([1] * n, trial, epoch, options["pool"], batch=batch)  # noqa: B023, E731
        if kind == "mixture":
            parts = [n, rng.randint(2, 9)]
            dataset = ConcatDataset([range(part) for part in parts])
            options["weights"] = [1, rng.choice([0.5, 1, 4])]
            order_of = lambda epoch: MixtureOrder(parts, options["weights"], trial, epoch)  # noqa: B023, E731
        samples = list(range(len(dataset)))
        may_go = rng.sample(samples, rng.randint(0, max(0, min(len(samples) - batch - 1, 8))))
        loader = ResumableLoader(dataset, dp_rank=0, dp_size=1, **options)
        events, number, steps = {}, 0, rng.randint(5, 40)
        found = []
        feed = itertools.chain.from_iterable(iter(lambda: iter(loader), None))  # noqa: B023
        while number < steps:
            while may_go and rng.random() < 0.3:
                some = [may_go.pop() for _ in range(min(len(may_go), rng.randint(1, 3)))]
                events.setdefault(number, set()).update(some)
                loader.skip(some)
            if rng.random() < 0.2:
                state = json.loads(json.dumps(loader.state_dict()))
                loader = ResumableLoader(dataset, dp_rank=0, dp_size=1, **options)
                loader.load_state_dict(state)
                feed = itertools.chain.from_iterable(iter(lambda: iter(loader), None))  # noqa: B023
            ahead = loader.peek(batch).tolist()
            real = loader.consumed_samples
            got = next(feed)
            got = got if kind == "mixture" else ids(got)
            real = loader.consumed_samples - real
            if kind != "mixture":  # whose data set says no more than which of its parts' samples it is
                found.append(got[:real])
                assert ahead[:real] == got[:real]
            else:
                found.append(ahead[:real])
            number += 1
        expected = naive_batches(len(dataset), batch, tail, order_of, events, steps)
        assert found == [[sample for _, sample in made] for made in expected], trial


# --- the loader ------------------------------------------------------------------------------------------------------


def run(dataset, batch, states, world, steps, **options):
    """Take steps of all ranks of a world, from a state; return the global batches, and each rank's new state."""
    loaders = [ResumableLoader(dataset, batch, dp_rank=r, dp_size=world, **options) for r in range(world)]
    for loader in loaders:
        if states is not None:
            loader.load_state_dict(json.loads(json.dumps(states)))
    feeds = [itertools.chain.from_iterable(iter(lambda it=loader: iter(it), None)) for loader in loaders]
    batches = []
    for _ in range(steps):
        parts = [next(feed) for feed in feeds]
        batches.append([i for part in parts for i in ids(part[0] if isinstance(part, tuple) else part)])
        assert max(map(len, map(ids, parts))) - min(map(len, map(ids, parts))) <= 1
    saved = [loader.state_dict() for loader in loaders]
    assert all(state == saved[0] for state in saved)
    for loader in loaders:
        loader.close()
    return batches, saved[0]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("seed", range(6))
def test_one_global_order_through_any_sequence_of_worlds_workers_and_kills(seed):
    rng = random.Random(seed)
    episodes = [rng.randint(1, 9) for _ in range(rng.randint(3, 20))]
    n, batch = sum(episodes), rng.randint(8, 24)
    options = {"seed": seed}
    if seed % 2:
        options |= {"pool": 4, "lanes": rng.choice([1, 2, 4])}
    dataset = Numbers(n, episodes)
    one, _ = run(dataset, batch, None, 1, 40, **options)
    state, found = None, []
    for world in (8, 3, 5, 1, 2):
        workers = 2 if seed < 2 and world < 4 else 0
        steps = rng.randint(1, 8)
        batches, state = run(dataset, batch, state, world, steps, num_workers=workers, **options)
        found += batches
        if rng.random() < 0.5:  # killed: what came after the last state is seen again
            run(dataset, batch, state, world, rng.randint(1, 3), **options)
    assert found == one[: len(found)]
    stream = [i for b in one for i in b]
    for epoch in range(len(stream) // n):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_a_for_is_an_epoch_and_one_that_is_left_goes_on():
    loader = ResumableLoader(Numbers(10), 4)
    assert (len(loader), loader.epoch) == (3, 0)
    first = [ids(batch) for batch in loader]
    assert (len(first), len(loader), loader.epoch, loader.consumed_samples) == (3, 2, 1, 12)
    for batch in loader:
        second = ids(batch)
        break
    assert (loader.batches, len(loader)) == (4, 2)
    rest = [ids(batch) for batch in loader]
    stream = [*itertools.chain(*first), *second, *itertools.chain(*rest)]
    assert sorted(stream[:10]) == sorted(stream[10:20]) == list(range(10))
    assert loader.peek(3).tolist() == [i for batch in [next(iter(loader))] for i in ids(batch)][:3]
    tiny = ResumableLoader(Numbers(3), 8)  # a batch may span several epochs
    assert [len(ids(batch)) for batch in tiny] == [8] and tiny.epoch == 2


def test_tails_are_carried_padded_or_dropped():
    padded = [list(ResumableLoader(Numbers(10), 4, tail="pad", dp_rank=r, dp_size=2)) for r in range(2)]
    masks = [[batch["sample_mask"].tolist() for batch in rank] for rank in padded]
    assert masks == [[[True, True]] * 3, [[True, True]] * 2 + [[False, False]]]
    real = [batch["i"][batch["sample_mask"]] for rank in padded for batch in rank]
    assert sorted(torch.cat(real).tolist()) == list(range(10))
    plain = ResumableLoader(list(range(5)), 3, tail="pad")
    *_, (batch, mask) = plain
    assert len(batch) == 3 and mask.tolist() == [True, True, False] and plain.consumed_samples == 5
    dropped = ResumableLoader(Numbers(10), 4, tail="drop")
    for epoch in range(3):
        assert len({i for batch in dropped for i in ids(batch)}) == 8 == len(dropped) * 4
        assert dropped.epoch == epoch + 1
    with pytest.raises(DataError, match="at least one batch of 11"):
        ResumableLoader(Numbers(10), 11, tail="drop")


def test_only_what_the_trainer_got_counts_and_its_generators_stay_as_they_are():
    for workers in (0, 2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        before = states_of_generators()
        loader = ResumableLoader(Numbers(100), 10, num_workers=workers, prefetch_factor=4)
        feed = iter(loader)
        got = [next(feed) for _ in range(3)]
        assert loader.state_dict()["batches"] == 3 and loader.consumed_samples == 30
        assert states_of_generators() == before
        resumed = ResumableLoader(Numbers(100), 10)
        resumed.load_state_dict(loader.state_dict())
        assert ids(next(iter(resumed))) == ids(next(feed)) and len(got) == 3
        loader.close()


@pytest.mark.full
def test_augmentation_follows_from_seed_epoch_and_sample_wherever_it_is_fetched():
    seen = {}
    for world, workers in ((1, 0), (3, 0), (2, 2)):
        for rank in range(world):
            loader = ResumableLoader(Numbers(12), 6, seed=5, dp_rank=rank, dp_size=world, num_workers=workers)
            for epoch in range(2):
                for batch in loader:
                    for i, noise in zip(ids(batch), batch["noise"].tolist(), strict=True):
                        assert seen.setdefault((epoch, i), noise) == noise
    assert len(seen) == 24 == len({tuple(noise) for noise in seen.values()})
    other = ResumableLoader(Numbers(12), 12, seed=6)
    assert not {tuple(noise) for batch in other for noise in batch["noise"].tolist()} & {*map(tuple, seen.values())}


def test_skipped_samples_stay_skipped_and_the_others_are_delivered_once():
    loader = ResumableLoader(Numbers(20), 6, num_workers=1)
    feed = iter(loader)
    seen = [*ids(next(feed)), *ids(next(feed))]
    upcoming = loader.peek(8).tolist()
    loader.skip([upcoming[0], upcoming[7], seen[0]])
    assert loader.peek(5).tolist() == upcoming[1:6] and loader.skipped == tuple(sorted([*upcoming[::7], seen[0]]))
    resumed = ResumableLoader(Numbers(20), 6, dp_rank=0, dp_size=1)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = [ids(batch) for batch in feed]
    assert rest == [ids(batch) for batch in resumed]
    for _ in range(3):
        assert not {i for batch in loader for i in ids(batch)} & {upcoming[0], upcoming[7], seen[0]}
    first_epoch = [*seen, *itertools.chain(*rest)][:18]
    assert sorted([*first_epoch, upcoming[0], upcoming[7]]) == list(range(20))
    loader.skip(range(0, 20, 2))
    assert {i for _ in range(2) for batch in loader for i in ids(batch)} <= set(range(1, 20, 2))
    with pytest.raises(DataError, match="0 samples of an epoch are not skipped, expected at least 1"):
        loader.skip(range(20))
    with pytest.raises(DataError, match="expected 0 to 19"):
        loader.skip([20])
    loader.close()


def test_a_sample_that_cannot_be_fetched_can_be_skipped():
    class Broken(Numbers):
        def __getitem__(self, i):
            if i == 7:
                raise OSError("sample 7 is broken")
            return super().__getitem__(i)

    for workers in (0, 1):
        loader = ResumableLoader(Broken(16), 4, num_workers=workers)
        seen = []
        while len(seen) < 15:
            try:
                for batch in loader:
                    seen += ids(batch)
            except OSError:
                loader.skip([7])
        assert sorted(seen[:15]) == [i for i in range(16) if i != 7]
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [DataError, CorruptDataError])
def test_what_a_data_set_refuses_is_said_in_its_own_words(workers, kind):
    class Refusing(Numbers):
        def __getitem__(self, i):
            raise kind("cannot read file-000.mp4: it ends early, expected a frame. Get it again.")

    loader = ResumableLoader(Refusing(16), 4, num_workers=workers)
    with pytest.raises(DataError) as raised:
        next(iter(loader))
    assert type(raised.value) is kind
    assert str(raised.value) == "cannot read file-000.mp4: it ends early, expected a frame. Get it again."
    loader.close()


@pytest.mark.parametrize("options", [{}, {"tail": "pad"}, {"pool": 3}, {"pool": 4, "lanes": 2}], ids=str)
def test_an_epoch_delivers_each_sample_exactly_once_over_all_ranks(options):
    lengths = [7, 1, 12, 5, 9, 3]
    n, epochs = sum(lengths), 3
    for batch, world in ((5, 1), (8, 3), (64, 2)):
        delivered = np.zeros((epochs + 3, n), dtype=int)
        for rank in range(world):
            loader = ResumableLoader(Numbers(n, lengths), batch, dp_rank=rank, dp_size=world, **options)
            while loader.epoch < epochs:
                before = loader.consumed_samples
                part = next(iter(loader))
                low, high = (r * batch // world for r in (rank, rank + 1))
                real = min(max(loader.consumed_samples - before - low, 0), high - low)
                first = before + low  # sample of the part, counted over all epochs
                for i, sample in enumerate(ids(part)[:real]):
                    delivered[(first + i) // n, sample] += 1
        assert (delivered[:epochs] == 1).all()


def test_workers_that_fetch_other_samples_than_the_order_has_are_an_error(monkeypatch):
    fetch = SampleFetcher.__getitems__
    monkeypatch.setattr(SampleFetcher, "__getitems__", lambda self, keys: fetch(self, [(0, 1)] * len(keys)))
    with pytest.raises(DataError, match="the workers fetched"):
        next(iter(ResumableLoader(Numbers(10), 5)))


def test_a_position_with_the_sums_of_earlier_versions_is_loaded():
    loader = ResumableLoader(Numbers(10), 4)
    next(iter(loader))
    assert "audit" not in loader.state_dict()
    resumed = ResumableLoader(Numbers(10), 4)
    resumed.load_state_dict(loader.state_dict() | {"audit": {"0": [4, 22, 146, 1036]}})
    assert resumed.peek(6).tolist() == loader.peek(6).tolist()


def test_what_makes_a_batch_draws_under_a_seed_of_its_own():
    def collate(samples):
        return [s["i"] for s in samples], torch.rand(2).tolist()

    torch.manual_seed(1)
    before = states_of_generators()
    found = [list(ResumableLoader(Numbers(8), 4, collate_fn=collate, num_workers=w)) for w in (0, 1)]
    assert found[0] == found[1] and found[0][0][1] != found[0][1][1] and states_of_generators() == before


def test_an_iterator_of_an_epoch_that_is_over_gives_nothing_of_the_next():
    loader = ResumableLoader(Numbers(8), 4)
    old = iter(loader)
    next(old)
    list(loader)
    next(iter(loader))
    assert list(old) == [] and loader.batches == 3


def test_samples_that_were_skipped_before_a_position_is_loaded_stay_skipped():
    loader = ResumableLoader(Numbers(8), 4)
    next(iter(loader))
    loader.skip([1])
    resumed = ResumableLoader(Numbers(8), 4)
    resumed.skip([2])
    resumed.load_state_dict(loader.state_dict())
    assert resumed.skipped == (1, 2)


@pytest.mark.ranks(2)
def test_ranks_that_are_not_equally_far_cannot_skip():
    loader = ResumableLoader(Numbers(20), 4)
    loader.skip([3])
    for _ in range(1 + dist.get_rank()):
        next(iter(loader))
    with pytest.raises(DataError, match=r"ranks \[1\] differ from rank 0"):
        loader.skip([4])


def test_a_rank_alone_is_not_known(monkeypatch):
    with pytest.raises(DataError, match="dp_rank is None, dp_size 2"):
        ResumableLoader(Numbers(8), 4, dp_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DataError, match="no process group"):
        ResumableLoader(Numbers(8), 4)


def test_a_position_in_another_order_is_refused_by_name():
    loader = ResumableLoader(Numbers(10), 4, seed=1)
    next(iter(loader))
    state = loader.state_dict()
    for other, match in [
        (ResumableLoader(Numbers(10), 4, seed=2), "seed 1, expected 2"),
        (ResumableLoader(Numbers(11), 4, seed=1), "n 10, expected 11"),
        (ResumableLoader(Numbers(10), 5, seed=1), "global_batch_size 4, expected 5"),
        (ResumableLoader(Numbers(10), 4, seed=1, tail="pad"), "tail 'carry', expected 'pad'"),
        (ResumableLoader(Numbers(10, [4, 6]), 4, seed=1, pool=2), "pool None, expected 2"),
        (ResumableLoader(Numbers(10, [4, 6]), 4, seed=1), None),
        (loader, "has delivered batches"),
    ]:
        if match is None:
            other.load_state_dict(state)
            continue
        with pytest.raises(DataError, match=match):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="it has no batches"):
        ResumableLoader(Numbers(10), 4, seed=1).load_state_dict({k: v for k, v in state.items() if k != "batches"})
    with pytest.raises(DataError, match="version 99"):
        ResumableLoader(Numbers(10), 4, seed=1).load_state_dict(state | {"version": 99})
    pooled = ResumableLoader(Numbers(10, [4, 6]), 4, pool=2)
    with pytest.raises(DataError, match="episodes"):
        ResumableLoader(Numbers(10, [5, 5]), 4, pool=2).load_state_dict(pooled.state_dict())
    # ... and the other way round: what the state has beyond the loader is another order, too
    with pytest.raises(DataError, match="pool 2, expected None"):
        ResumableLoader(Numbers(10, [4, 6]), 4).load_state_dict(pooled.state_dict())


@pytest.mark.parametrize("kind", some(["carry", "pad", "drop", "sequential", "pool", "lanes", "mixture"], ["lanes"]))
def test_another_batch_size_continues_at_the_same_sample(kind):  # noqa: C901
    rng = random.Random(kind)
    for trial in range(40):
        lengths = [rng.randint(1, 6) for _ in range(rng.randint(4, 9))]
        n = sum(lengths)
        dataset = Numbers(n, lengths)
        options = {"seed": trial, "tail": kind if kind in ("pad", "drop") else "carry", "dp_rank": 0, "dp_size": 1}
        options |= {"pool": {"pool": 3}, "lanes": {"pool": 4, "lanes": 2}, "sequential": {"shuffle": False}}.get(
            kind, {}
        )
        order = GlobalOrder if kind != "sequential" else lambda n, *_: range(n)
        if kind == "mixture":
            dataset, options["weights"] = ConcatDataset([Numbers(n), Numbers(3)]), [2, 1]
        loader = ResumableLoader(dataset, rng.randint(2, 5), **options)
        feed = itertools.chain.from_iterable(iter(lambda: iter(loader), None))  # noqa: B023
        per_epoch = {}
        for _ in range(rng.randint(2, 6)):
            for _ in range(rng.randint(0, 8)):
                keys = loader._plan.keys(loader.batches, 0, loader.global_batch_size)
                real = loader.consumed_samples
                next(feed)
                for epoch, sample in keys[: loader.consumed_samples - real]:
                    per_epoch.setdefault(epoch, []).append(sample)
            state, epoch, coming = json.loads(json.dumps(loader.state_dict())), loader.epoch, loader.peek(1).tolist()
            ends, may_change = loader.at_epoch_end, kind == "lanes" and not loader._plan.position_of(loader.batches)[1]
            loader = ResumableLoader(dataset, rng.randint(2, 5), **options)
            loader.load_state_dict(state, any_batch_size=True)
            feed = itertools.chain.from_iterable(iter(lambda: iter(loader), None))  # noqa: B023
            if kind != "drop" or loader.epoch == epoch:
                assert loader.epoch == epoch
                assert may_change or loader.peek(1).tolist() == coming  # an epoch that has not begun gets new lanes
                assert loader.at_epoch_end == ends
            again = ResumableLoader(dataset, loader.global_batch_size, **options)
            again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            assert again.peek(3 * n).tolist() == loader.peek(3 * n).tolist()
        *complete, last = sorted(per_epoch) or [0]
        for epoch in complete:
            found = per_epoch[epoch]
            if kind in ("carry", "pad", "sequential"):
                assert found == list(order(n, trial, epoch).indices(0, n) if kind != "sequential" else range(n))
            elif kind == "drop":
                expected = GlobalOrder(n, trial, epoch).indices(0, n).tolist()
                assert found == expected[: len(found)]
                assert n - len(found) < 5
            elif kind != "mixture":
                assert sorted(found) == list(range(n)), (trial, epoch, last)


def test_lanes_are_laid_out_for_the_new_batches_from_the_next_epoch_on():
    dataset = Numbers(400, [10] * 40)
    options = {"pool": 8, "lanes": 4}
    loader = ResumableLoader(dataset, 16, dp_rank=0, dp_size=1, **options)
    feed = iter(loader)
    for _ in range(7):
        next(feed)
    other = ResumableLoader(dataset, 12, dp_rank=0, dp_size=1, **options)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())), any_batch_size=True)
    assert other.state_dict()["version"] == 2  # which no earlier version reads as if the lanes were those of 12 samples
    plan, first = other._plan, other._plan.end_of(0)
    episodes = [set(), set()]
    for batch in range(first + 1, first + 30):
        for rank in (0, 1):
            episodes[rank] |= plan.episodes(batch, rank * 6, rank * 6 + 6)
    assert len(episodes[0] & episodes[1]) <= 3  # those that a boundary of lanes cuts
    fresh = ResumableLoader(dataset, 12, dp_rank=0, dp_size=1, **options).state_dict()
    assert (fresh["version"], "layouts" in fresh) == (1, False)


def test_without_shuffling_every_epoch_has_the_order_of_the_data_set():
    loader = ResumableLoader(Numbers(7), 3, shuffle=False, tail="pad")
    for _ in range(2):
        batches = [(ids(batch), batch["sample_mask"].tolist()) for batch in loader]
        assert batches == [([0, 1, 2], [True] * 3), ([3, 4, 5], [True] * 3), ([6, 6, 6], [True, False, False])]
    loader = ResumableLoader(Numbers(7), 3, shuffle=False)
    loader.skip([1, 4])
    assert [ids(batch) for batch in loader] == [[0, 2, 3], [5, 6, 0]]
    with pytest.raises(DataError, match="shuffle None, expected False"):
        loader = ResumableLoader(Numbers(7), 3, shuffle=False)
        loader.load_state_dict(ResumableLoader(Numbers(7), 3).state_dict())


@pytest.mark.ranks(3)
def test_an_evaluation_over_unequal_ranks_is_the_exact_mean():
    """As docs/data.md has it: 10 samples in batches of 4 on 3 ranks, so parts of 1 or 2, the last ones padding."""
    strategy = FSDPV2Strategy(bf16=False)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    x = torch.arange(10.0)[:, None]
    expected = model(x).square().double().mean().item()
    strategy.prepare_model(model)
    total, count, seen = torch.zeros((), dtype=torch.float64), torch.tensor(0), []
    for batch in ResumableLoader(Numbers(10), 4, shuffle=False, tail="pad"):
        losses, counts = model(batch["i"][:, None].float()).detach().square()[:, 0], batch["sample_mask"]
        total += losses[counts].sum()
        count += counts.sum()
        seen.append(len(losses))
    sums = strategy.all_reduce({"loss": total, "count": count}, "sum")
    assert int(sums["count"]) == 10
    assert (sums["loss"] / sums["count"]).item() == pytest.approx(expected, rel=1e-6)
    assert seen == [2 if dist.get_rank() == 2 else 1] * 3
    strategy.close()


@pytest.mark.full
def test_wrong_arguments_of_the_loader_are_errors():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    for make, match in [
        (lambda: ResumableLoader(Endless(), 4), "the data set is a Endless, expected a map-style"),
        (lambda: ResumableLoader(Numbers(10), 2, dp_rank=0, dp_size=3), "dp_size 3, global_batch_size 2"),
        (lambda: ResumableLoader(Numbers(10), 4, dp_rank=2, dp_size=2), "dp_rank is 2"),
        (lambda: ResumableLoader(Numbers(10), 4, tail="wrap"), "tail is 'wrap'"),
        (lambda: ResumableLoader(Numbers(10), 4, pool=2), "episode_lengths of Numbers add up to"),
        (lambda: ResumableLoader(Numbers(10), 4, lanes=2), "lanes 2"),
        (lambda: ResumableLoader(Numbers(10, [5, 5]), 4, pool=2, shuffle=False), "shuffle is False, pool 2"),
        (lambda: ResumableLoader(Numbers(10), 4, weights=[1.0]), "expected a ConcatDataset"),
        (lambda: ResumableLoader(Numbers(0), 4), "n is 0"),
    ]:
        with pytest.raises(DataError, match=match):
            make()


def test_a_mixture_resumes_on_other_ranks_and_skips_every_copy():
    mixed = ConcatDataset([Numbers(30), Numbers(5)])
    for part, dataset in enumerate(mixed.datasets):
        dataset.__class__ = type("Shifted", (Numbers,), {"__getitem__": lambda s, i, p=part: {"i": i + 30 * p}})
    one, _ = run(mixed, 6, None, 1, 20, weights=[1, 1])
    found, state = run(mixed, 6, None, 2, 7, weights=[1, 1])
    found += run(mixed, 6, state, 3, 13, weights=[1, 1])[0]
    assert found == one
    loader = ResumableLoader(mixed, 6, weights=[1, 1])
    loader.skip([31])
    for _ in range(3):
        drawn = [i for batch in loader for i in ids(batch)]
        assert 31 not in drawn and 34 in drawn


def test_a_sampler_draws_one_global_order_on_any_number_of_ranks():
    def drawn(world, consumed, **options):
        ranks = [
            list(ResumableSampler(range(50), num_replicas=world, rank=r, consumed_samples=consumed, seed=3, **options))
            for r in range(world)
        ]
        return [i for group in zip(*ranks, strict=True) for i in group]

    assert drawn(1, 0) == GlobalOrder(50, 3, 0).indices(0, 50).tolist()
    for world in (2, 5):
        assert drawn(world, 0) == drawn(1, 0) and drawn(world, 20) == drawn(1, 20)
    assert drawn(1, 0, shuffle=False) == list(range(50))
    assert drawn(4, 0)[50:] == drawn(1, 0)[:2] and len(drawn(4, 0, drop_last=True)) == 48
    few = [list(ResumableSampler(range(2), num_replicas=5, rank=r)) for r in range(5)]
    assert sorted(itertools.chain(*few)) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


# --- with checkpoints ------------------------------------------------------------------------------------------------


class Sequences(Dataset):
    """Token sequences, some of whose tokens are replaced at random."""

    def __init__(self, n=11):
        self.data = [tokens(torch.Generator().manual_seed(i), batch=1)[0] for i in range(n)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        drop = torch.rand(len(self.data[i])) < 0.1
        return {"ids": torch.where(drop, 0, self.data[i]), "sample": i}


def trainer(batch=4, workers=0):
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, max_norm=1.0))
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    return strategy, model, optimizer, ResumableLoader(Sequences(), batch, seed=3, num_workers=workers)


def train(strategy, model, optimizer, loader, steps, *, shuffled=True):
    losses, feed = [], itertools.chain.from_iterable(iter(lambda: iter(loader), None))
    for batch in itertools.islice(feed, steps):
        x = batch["ids"]
        x = x[:, torch.randperm(x.shape[1])] if shuffled else x  # the trainer's own generator
        logits = model(input_ids=x).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
        items = 4 * (x.shape[1] - 1)
        strategy.backward(loss, model, optimizer, num_items_in_batch=items)
        strategy.optimizer_step(optimizer, model)
        losses.append((loss.item(), batch["sample"].tolist()))
    loader.close()
    return losses


@pytest.mark.full
@pytest.mark.parametrize("workers", some([0, 1], [0]))
@pytest.mark.ranks(2)
def test_three_resumes_across_an_epochs_end_give_the_same_losses(workers, tmp_path):
    expected = train(*trainer(workers=workers), 12)
    found = []
    for part, steps in enumerate((2, 3, 4, 3)):  # an epoch has 11 samples: 2.75 batches
        strategy, model, optimizer, loader = trainer(workers=workers)
        loaded = strategy.load_ckpt(model, tmp_path, optimizer=optimizer, dataloader=loader)
        assert (loaded[0] is not None) == (part > 0) and loader.batches == len(found)
        found += train(strategy, model, optimizer, loader, steps)
        strategy.save_ckpt(model, tmp_path, optimizer=optimizer, dataloader=loader)
        train(strategy, model, optimizer, loader, 2)  # killed: this is lost
    assert found == expected


def part_of_a_run(path, steps):
    strategy, model, optimizer, loader = trainer()
    strategy.load_ckpt(model, path, optimizer=optimizer, dataloader=loader)
    before = loader.batches
    losses = train(strategy, model, optimizer, loader, steps, shuffled=False)
    strategy.save_ckpt(model, path, optimizer=optimizer, dataloader=loader)
    total = torch.tensor([loss for loss, _ in losses], dtype=torch.float64)
    dist.all_reduce(total)
    samples = [None] * dist.get_world_size()
    dist.all_gather_object(samples, [part for _, part in losses])
    if dist.get_rank() == 0:
        record = [
            {"batch": before + i, "loss": total[i].item(), "samples": list(itertools.chain(*(s[i] for s in samples)))}
            for i in range(steps)
        ]
        with (path / "log.jsonl").open("a") as log:
            print(json.dumps(record), file=log)
    dist.barrier()


@pytest.mark.full
def test_batches_stay_the_same_on_changing_numbers_of_ranks(tmp_path, run_on):
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
    run_on(1, part_of_a_run, path=one, steps=9)
    for world in (4, 3, 1):
        run_on(world, part_of_a_run, path=other, steps=3)
    expected, *parts = [
        list(itertools.chain(*map(json.loads, (path / "log.jsonl").read_text().splitlines()))) for path in (one, other)
    ]
    assert [r["samples"] for r in parts[0]] == [r["samples"] for r in expected]
    assert [r["loss"] for r in parts[0]] == pytest.approx([r["loss"] for r in expected], rel=1e-4)


def part_of_a_run_with_its_own_batches(path, batch):
    strategy, model, optimizer, loader = trainer(batch)
    if list(path.glob("global_step*")):
        with pytest.raises(CheckpointError, match="continue at the same sample with another batch size, load with"):
            strategy.load_ckpt(model, path, optimizer=optimizer, dataloader=loader)
        with pytest.raises(CheckpointError, match="another kind of loader"):
            other = Stateful(dist.get_rank())
            strategy.load_ckpt(model, path, optimizer=optimizer, dataloader=other, load_data_position="samples")
    strategy.load_ckpt(model, path, optimizer=optimizer, dataloader=loader, load_data_position="samples")
    losses = train(strategy, model, optimizer, loader, 2, shuffled=False)
    strategy.save_ckpt(model, path, optimizer=optimizer, dataloader=loader)
    samples = [None] * dist.get_world_size()
    dist.all_gather_object(samples, [part for _, part in losses])
    if dist.get_rank() == 0:
        with (path / "log.jsonl").open("a") as log:
            print(json.dumps([list(itertools.chain(*parts)) for parts in zip(*samples, strict=True)]), file=log)
    dist.barrier()


@pytest.mark.full
def test_a_run_with_another_global_batch_continues_at_the_same_sample(tmp_path, run_on):
    for world, batch in ((2, 4), (3, 6), (1, 3)):
        run_on(world, part_of_a_run_with_its_own_batches, path=tmp_path, batch=batch)
    batches = itertools.chain(*map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines()))
    n = len(Sequences())
    stream = [sample for epoch in range(3) for sample in GlobalOrder(n, 3, epoch).indices(0, n).tolist()]
    assert [len(batch) for batch in batches] == [4, 4, 6, 6, 3, 3]
    found = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [sample for part in found for batch in part for sample in batch] == stream[:26]


class Stateful:
    """A loader as others write them: a state a rank, of whatever torch and NumPy give."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank)
        self.numpy = np.random.default_rng(rank)
        self.at = 0
        self.loaded = None

    def __iter__(self):
        for _ in range(self.at, 5):
            self.at += 1
            yield torch.rand(2, generator=self.generator)

    def state_dict(self):
        return {
            "at": self.at,
            3: ("tuple", [None, True, 0.5, b"bytes"]),
            "generator": self.generator.get_state(),
            "numpy": self.numpy.bit_generator.state,
            "array": np.arange(3, dtype=np.int16),
            "number": np.int64(4),
        }

    def load_state_dict(self, state):
        self.loaded = state
        self.at = state["at"]
        self.generator.set_state(state["generator"])
        self.numpy.bit_generator.state = state["numpy"]


@pytest.mark.ranks(2)
def test_loaders_of_others_keep_a_state_a_rank(tmp_path):
    strategy, model, optimizer, ours = trainer()
    loader = Stateful(dist.get_rank())
    feed = iter(loader)
    next(feed)
    path = strategy.save_ckpt(model, tmp_path, optimizer=optimizer, dataloader=loader)
    expected = [next(feed), torch.from_numpy(loader.numpy.random(2))]
    fresh = Stateful(9)
    strategy.load_ckpt(model, tmp_path, optimizer=optimizer, dataloader=fresh)
    assert torch.equal(next(iter(fresh)), expected[0])
    assert torch.equal(torch.from_numpy(fresh.numpy.random(2)), expected[1])
    assert fresh.loaded[3] == ("tuple", [None, True, 0.5, b"bytes"]) and fresh.loaded["number"] == 4
    assert fresh.loaded["array"].dtype == np.int16 and fresh.loaded["array"].tolist() == [0, 1, 2]
    assert sorted(file.name for file in Path(path, "data").iterdir()) == [
        "rank00000.safetensors",
        "rank00001.safetensors",
    ]
    with pytest.raises(CheckpointError, match="another kind of loader than ResumableLoader"):
        strategy.load_ckpt(model, tmp_path, optimizer=optimizer, dataloader=ours)
    with pytest.raises(CheckpointError, match=r"dataloader\['it'\] is a generator"):
        loader.state_dict = lambda: {"it": (i for i in ())}
        strategy.save_ckpt(model, tmp_path, "other", optimizer=optimizer, dataloader=loader)
    for odd in (np.array(["text"]), np.longdouble(1), torch.eye(2).to_sparse(), {1}):
        loader.state_dict = lambda odd=odd: {"it": odd}
        with pytest.raises(CheckpointError, match=r"dataloader\['it'\] is a "):
            strategy.save_ckpt(model, tmp_path, "other", optimizer=optimizer, dataloader=loader)
    with pytest.raises(CheckpointError, match="the data loader is a list"):
        strategy.save_ckpt(model, tmp_path, "other", optimizer=optimizer, dataloader=[1])


def save_with_foreign_loader(path):
    strategy, model, optimizer, _ = trainer()
    strategy.save_ckpt(model, path, optimizer=optimizer, dataloader=Stateful(dist.get_rank()))


def load_with_foreign_loader(path):
    strategy, model, optimizer, _ = trainer()
    before = full_state(model, optimizer)
    with pytest.raises(CheckpointError, match=r"one state per rank, on 2 ranks, and this run has 3"):
        strategy.load_ckpt(model, path, optimizer=optimizer, dataloader=Stateful(0))
    assert_same(full_state(model, optimizer), before)
    strategy.load_ckpt(model, path, optimizer=optimizer)


def test_a_loaders_state_is_restored_with_its_types():
    class Bytes(bytes):
        pass

    state = {"list": [1, (2.5, None, "x")], 3: np.arange(6, dtype=np.uint16).reshape(2, 3).T, "bytes": Bytes(b"hi")}
    restored = data_position._deserialize(
        data_position._serialize(state | {"tensor": nn.Parameter(torch.ones(2, 3).T)})
    )
    assert restored["list"] == state["list"] and restored["bytes"] == b"hi" and type(restored["tensor"]) is torch.Tensor
    assert restored[3].dtype == np.uint16 and np.array_equal(restored[3], state[3])


def test_loaders_of_others_are_refused_on_another_number_of_ranks(tmp_path, run_on):
    run_on(2, save_with_foreign_loader, path=tmp_path)
    run_on(3, load_with_foreign_loader, path=tmp_path)


@pytest.mark.ranks(2)
def test_a_position_is_left_alone_when_that_is_said(tmp_path):
    strategy, model, optimizer, loader = trainer()
    next(iter(loader))
    strategy.save_ckpt(model, tmp_path, optimizer=optimizer, dataloader=loader)
    other, records, handler = trainer(batch=6)[-1], [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("fsdp2_strategy").addHandler(handler)
    strategy.load_ckpt(model, tmp_path, optimizer=optimizer, dataloader=other, load_data_position=False)
    logging.getLogger("fsdp2_strategy").removeHandler(handler)
    assert (other.batches, records) == (0, [])
    with pytest.raises(ArgumentError, match="load_data_position is 'sample', expected True, False or 'samples'"):
        strategy.load_ckpt(model, tmp_path, optimizer=optimizer, dataloader=other, load_data_position="sample")
    stateful = Stateful(dist.get_rank())
    strategy.save_ckpt(model, tmp_path, "own", optimizer=optimizer, dataloader=stateful)
    with pytest.raises(CheckpointError, match="the loader is a Stateful, expected a ResumableLoader"):
        strategy.load_ckpt(
            model, tmp_path, tag="own", optimizer=optimizer, dataloader=stateful, load_data_position="samples"
        )
    strategy.close()


@pytest.mark.ranks(2)
def test_positions_that_do_not_fit_are_refused_before_anything_is_touched(tmp_path):
    strategy, model, optimizer, loader = trainer()
    train(strategy, model, optimizer, loader, 2)
    strategy.save_ckpt(model, tmp_path / "with", optimizer=optimizer, dataloader=loader)
    strategy.save_ckpt(model, tmp_path / "without", optimizer=optimizer)
    strategy, model, optimizer, loader = trainer()
    before = full_state(model, optimizer)
    with pytest.raises(CheckpointError, match="global_batch_size 4, expected 6"):
        strategy.load_ckpt(model, tmp_path / "with", dataloader=ResumableLoader(Sequences(), 6, seed=3))
    with pytest.raises(CheckpointError, match="cannot load the data position"):
        strategy.load_ckpt(model, tmp_path / "without", dataloader=loader)
    assert_same(full_state(model, optimizer), before)
    ahead = ResumableLoader(Sequences(), 4, seed=3)
    for _ in range(dist.get_rank()):
        next(iter(ahead))
    with pytest.raises(CheckpointError, match="loaders at the same position"):
        strategy.save_ckpt(model, tmp_path / "uneven", dataloader=ahead)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fsdp2_strategy").addHandler(handler)
    strategy.load_ckpt(model, tmp_path / "with")
    logging.getLogger("fsdp2_strategy").removeHandler(handler)
    assert dist.get_rank() or any("has a data position, which is not loaded" in message for message in said)


# --- what is held ----------------------------------------------------------------------------------------------------


class Held(Numbers):
    """Sample i of a data set that is told which episodes to hold."""

    def __init__(self, lengths):
        super().__init__(sum(lengths), np.asarray(lengths))
        self.episode_of = np.repeat(np.arange(len(lengths)), lengths)
        self.now, self.soon, self.changes, self.pauses = [], [], [], 0

    def hold(self, now, soon):
        if (now, soon) != (self.now, self.soon):
            self.changes.append((now, soon))
        self.now, self.soon = now, soon

    def pause(self):
        self.pauses += 1

    def __getitem__(self, i):
        assert not self.now or self.episode_of[i] in self.now
        return {"i": i}


@pytest.mark.parametrize(("lanes", "ranks"), some_rows([(1, 1), (1, 2), (4, 2), (4, 3)], [(4, 2)]))
def test_a_data_set_is_told_which_episodes_come_and_which_are_next(lanes, ranks):
    lengths = np.random.default_rng(0).integers(20, 60, 40).tolist()
    for rank in range(ranks):
        dataset = Held(lengths)
        loader = ResumableLoader(dataset, 8, pool=4, lanes=lanes, dp_rank=rank, dp_size=ranks)
        for _ in range(2):
            for _ in loader:
                assert len(dataset.now) <= 2 * 4 and not set(dataset.now) & set(dataset.soon)
        loader.close()
        changes = [[set(part) for part in change] for change in dataset.changes]
        assert len(changes) > 10 and dataset.pauses == 1
        for (now, soon), (then, _) in itertools.pairwise(changes):
            assert then <= now | soon, "none comes as a surprise"


@pytest.mark.parametrize(
    ("lengths", "batch", "tail"),
    [
        ([6, 2, 2, 4], 4, "carry"),  # others, and soon the same again
        pytest.param([4, 3], 4, "drop", marks=pytest.mark.full),
        ([2, 5, 7, 5, 5], 5, "pad"),  # what stands in for padding is of another lane
        pytest.param([1], 5, "pad", marks=pytest.mark.full),  # a part of padding alone
    ],
)
def test_no_sample_is_asked_for_whose_episode_is_not_held(lengths, batch, tail):
    for rank in range(2):
        dataset = Held(lengths)
        loader = ResumableLoader(dataset, batch, pool=3, lanes=3, dp_rank=rank, dp_size=2, tail=tail)
        for _ in range(20):
            for _ in loader:  # the data set asserts that
                assert dataset.now


def test_a_pool_of_all_episodes_is_told_once():
    dataset = Held([5, 5, 5])
    loader = ResumableLoader(dataset, 5, pool=3)
    for _ in range(3):
        list(loader)
    assert dataset.changes == [([0, 1, 2], [])]


def test_a_data_set_may_have_a_mask_of_its_own_beside_that_of_padding():
    class Masked(Numbers):
        def __getitem__(self, i):
            return {"i": i, "sample_mask": torch.tensor(i != 2)}

    *_, last = ResumableLoader(Masked(5), 3, tail="pad")
    real = [i for i, counts in zip(ids(last), last["sample_mask"].tolist(), strict=True) if counts]
    assert sorted(real) == sorted(set(ids(last)) - {2})
    assert last["sample_mask"].tolist()[2] is False

    class Named(Numbers):
        def __getitem__(self, i):
            return {"i": i, "sample_mask": i}

    with pytest.raises(DataError, match="'sample_mask' is not a bool tensor"):
        list(ResumableLoader(Named(5), 3, tail="pad"))
