"""The samples of a trainer's epochs: equal on all ways to resume, for samplers with any random generator."""

from __future__ import annotations

import itertools
import random
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import trainers
from helpers.trainers import launched, trainer_of, write_model
from helpers.worlds import some, worlds
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from fsdp2_strategy.integrations.trl import with_fsdp2

pytest.importorskip("trl")

WEIGHTS = torch.linspace(0.1, 2.0, trainers.SAMPLES)


class Lazy(Sampler):
    """Draws each index when it is asked for it, from all generators of the process."""

    def __len__(self):
        return trainers.SAMPLES

    def __iter__(self):
        for _ in range(trainers.SAMPLES):
            drawn = random.randrange(99) + int(np.random.randint(99)) + int(torch.randint(99, ()))  # noqa: NPY002
            yield drawn % trainers.SAMPLES


class Batches(BatchSampler):
    """Shuffles whole batches."""

    def __iter__(self):
        batches = list(super().__iter__())
        yield from (batches[i] for i in torch.randperm(len(batches)))


class Kept(Batches):
    """Keeps a generator of its own over the epochs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        batches = list(BatchSampler.__iter__(self))
        yield from (batches[i] for i in torch.randperm(len(batches), generator=self.generator))


def _generator():
    return torch.Generator().manual_seed(5)


SAMPLERS = {
    "grouped": None,
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, trainers.SAMPLES),
    "weighted_own": lambda: WeightedRandomSampler(WEIGHTS, trainers.SAMPLES, generator=_generator()),
    "replaced": lambda: RandomSampler(range(trainers.SAMPLES), replacement=True),
    "shuffled": lambda: RandomSampler(range(trainers.SAMPLES)),
    "lazy": Lazy,
    "batches": lambda: Batches(range(trainers.SAMPLES), 2, False),
    "batches_kept": lambda: Kept(range(trainers.SAMPLES), 2, False),
}


def sampled(name, seen, cls):
    """Make a trainer class with a sampler, which records the tokens of each micro-batch and the step."""

    class Sampled(cls):
        def __init__(self, *args, **kwargs):
            data = trainers.Sequences()  # it has no end, which `group_by_length` looks for
            super().__init__(*args, **kwargs | {"train_dataset": [data[i] for i in range(len(data))]})

        def _get_train_sampler(self, *args):
            return super()._get_train_sampler(*args) if SAMPLERS[name] is None else SAMPLERS[name]()

        def get_train_dataloader(self):
            if not name.startswith("batches"):
                return super().get_train_dataloader()
            collate = self.data_collator
            loader = DataLoader(self.train_dataset, batch_sampler=SAMPLERS[name](), collate_fn=collate)
            return self.accelerator.prepare(loader)

        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.setdefault(self.state.global_step, []).append(inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Sampled


def indices(name, folder, output, *, wrap=with_fsdp2, resume=None, **options):
    """Run a trainer, and return the tokens that this rank has seen, by step."""
    seen = {}
    if name == "grouped":
        options["train_sampling_strategy"] = "group_by_length"
    with launched():
        trainer = trainer_of("plain", lambda cls: wrap(sampled(name, seen, cls)), folder, output, **options)
        trainer.train(resume_from_checkpoint=resume)
    return seen


SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 10}
"""An epoch has 6 steps of 4 samples a rank, on 2 ranks."""


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(SAMPLERS, ("weighted_own",)))
def test_a_resume_at_any_step_of_any_epoch_has_the_samples_of_the_run_without_a_stop(tmp_path, name):
    model = write_model(tmp_path / "model", attention_dropout=0.1)
    whole = indices(name, model, tmp_path / "run", **SAVES)
    assert len(whole) == 10
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, [row for rows in list(whole.values())[:6] for batch in rows for row in batch])
    if "weighted" not in name and name not in ("lazy", "replaced"):
        rows = {tuple(row) for row in itertools.chain(*of_ranks)}
        assert len(rows) == trainers.SAMPLES, "an epoch has each sample once"
    for step in (2, 6, 8):
        resumed = indices(
            name, model, tmp_path / f"on{step}", resume=str(tmp_path / "run" / f"checkpoint-{step}"), **SAVES
        )
        assert resumed == {at: rows for at, rows in whole.items() if at >= step}, step


@pytest.mark.full
@pytest.mark.parametrize("world", worlds(1, 2, usual=(1,)))
@pytest.mark.parametrize("name", some(("grouped", "weighted", "weighted_own", "shuffled", "batches"), ("grouped",)))
def test_the_order_of_a_run_is_that_of_the_trainer_itself(tmp_path, world, name):
    model = write_model(tmp_path / "model")
    expected = indices(name, model, tmp_path / "theirs", wrap=lambda cls: cls, max_steps=14)
    assert indices(name, model, tmp_path / "ours", max_steps=14) == expected


@pytest.mark.full
@pytest.mark.ranks(2)
def test_ranks_whose_random_states_differ_share_one_order(tmp_path):
    model = write_model(tmp_path / "model")
    seen = {}

    def drawing(cls):
        class Drawing(sampled("weighted", seen, cls)):
            def training_step(self, *args, **kwargs):
                torch.rand(3 * dist.get_rank())
                return super().training_step(*args, **kwargs)

        return with_fsdp2(Drawing)

    with launched():
        trainer = trainer_of("plain", drawing, model, tmp_path / "run", max_steps=12)
        batches = []
        follow = trainer.accelerator.sample_order._begin_epoch
        trainer.accelerator.sample_order._begin_epoch = lambda *args: batches.append(follow(*args)) or batches[-1]
        trainer.train()
    assert len(batches) == 2
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, [torch_state.tolist() for *_, torch_state in batches])
    assert of_ranks[0] == of_ranks[1]


class Stream(IterableDataset):
    """A stream that is the same in each epoch, or shuffled by the epoch."""

    def __init__(self, is_shuffled):
        self.epoch, self.is_shuffled, self.samples = 0, is_shuffled, trainers.Sequences()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(trainers.SAMPLES))
        if self.is_shuffled:
            random.Random(self.epoch).shuffle(order)
        yield from (self.samples[i] for i in order)


def stream_of(kind):
    if kind != "hub":
        return Stream(kind == "shuffled")
    import datasets

    samples = trainers.Sequences()
    rows = [{name: tensor.tolist() for name, tensor in samples[i].items()} for i in range(trainers.SAMPLES)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=1, buffer_size=16)


@pytest.mark.full
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", some(("fixed", "shuffled", "hub"), ("shuffled",)))
def test_a_resumed_stream_continues_where_it_stopped(tmp_path, kind):
    model = write_model(tmp_path / "model")

    def run(output, resume=None):
        seen = {}

        def streaming(cls):
            class Streaming(sampled("grouped", seen, cls)):
                def __init__(self, *args, **kwargs):
                    super().__init__(*args, **kwargs)
                    self.train_dataset = stream_of(kind)

            return with_fsdp2(Streaming)

        with launched():
            trainer = trainer_of("plain", streaming, model, output, **SAVES)
            trainer.train(resume_from_checkpoint=resume)
        return seen

    whole = run(tmp_path / "run")
    for step in (2, 8):
        resumed = run(tmp_path / f"on{step}", str(tmp_path / "run" / f"checkpoint-{step}"))
        assert resumed == {at: rows for at, rows in whole.items() if at >= step}
    dist.barrier()
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
