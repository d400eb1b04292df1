"""The robot that learns: its table, its expert, its policy, and the whole way from demonstrations to success."""

from __future__ import annotations

import json

import numpy as np
import pytest
import robot
import torch
import torch.distributed as dist
from flow_vla import CAMERA, CHUNK, EXECUTED, FlowBlock, FlowVLA, Processor, make_backbone
from table import LIFT, LIMIT, ON_PAD, PADS, PUCKS, REACH, Tables, demonstrate, expert
from train_vla import UNSEEN, drive, open_demonstrations, trials, write_demonstrations

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

STATS = {
    CAMERA: {"mean": [[[0.9]], [[0.9]], [[0.8]]], "std": [[[0.2]], [[0.15]], [[0.2]]]},
    "observation.state": {"mean": [0.5, 0.5, 0.4], "std": [0.24, 0.24, 0.5]},
    "action": {"mean": [0.5, 0.5, 0.0], "std": [0.24, 0.24, 1.0]},
}


def done_by(act, seeds):
    tables, done = Tables(seeds), np.zeros(len(seeds), dtype=bool)
    for _ in range(LIMIT):
        tables.step(act(tables))
        done |= tables.done
    return done


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_expert_does_every_table_and_chance_next_to_none():
    random = np.random.default_rng(0)
    assert done_by(expert, range(200)).all()
    assert done_by(lambda tables: random.uniform([0, 0, -1], 1, (len(tables), 3)), range(200)).mean() < 0.02


def test_who_does_not_read_the_instruction_brings_the_wrong_puck_or_to_the_wrong_pad():
    def deaf(tables):  # it takes the red puck to the green pad, whatever it is told
        puck, pad = (tables.colours[:, i] for i in range(2))
        at = np.arange(len(tables))
        goal = np.where((tables.held == puck)[:, None], tables.pads[at, pad], tables.pucks[at, puck])
        far = np.linalg.norm(goal - tables.magnet, axis=1)
        on = np.where(tables.held == puck, far > ON_PAD / 2, (far < 1.5 * REACH) & (tables.held < 0))
        return np.concatenate([goal, np.where(on, 1, -1)[:, None]], axis=1)

    told = np.array([text == "red puck on green pad" for text in Tables(range(400)).instructions])
    done = done_by(deaf, range(400))
    assert 0.2 < told.mean() < 0.3 and done[told].all() and not done[~told].any()


def test_a_table_is_the_same_wherever_it_stands():
    one, many = Tables([7]), Tables([3, 7, 11])
    for _ in range(5):
        assert np.array_equal(one.images()[0], many.images()[1]) and np.array_equal(one.state[0], many.state[1])
        one.step(expert(one))
        many.step(expert(many))
    assert one.instructions[0] == many.instructions[1]
    assert not np.array_equal(many.images()[0], many.images()[2])


def test_a_magnet_lifts_what_is_near_and_moves_no_farther_than_it_reaches():
    tables = Tables(range(50))
    before = tables.magnet.copy()
    tables.step(np.concatenate([tables.pucks[:, 1], np.ones((50, 1))], axis=1))
    assert (np.linalg.norm(tables.magnet - before, axis=1) < REACH + 1e-6).all()
    near = np.linalg.norm(Tables(range(50)).pucks - tables.magnet[:, None], axis=2).min(axis=1) < LIFT
    assert np.array_equal(tables.held >= 0, near) and np.array_equal(tables.state[:, 2] > 0, near)
    tables.step(np.concatenate([tables.magnet, -np.ones((50, 1))], axis=1))
    assert (tables.held < 0).all()


def test_what_a_camera_sees_tells_colours_and_places():
    tables = Tables([5])
    image = tables.images()[0]
    for things, colours, named in ((tables.pucks, PUCKS, 0), (tables.pads, PADS, 1)):
        for i in range(2):
            x, y = (things[0, i] * len(image)).astype(int)
            assert tuple(image[y, x]) == list(colours.values())[tables.colours[0, named] ^ i]


# --- demonstrations --------------------------------------------------------------------------------------------------


def test_demonstrations_are_written_once_and_say_what_the_expert_does_next(tmp_path):
    root = write_demonstrations(tmp_path / "data", episodes=3)
    written = (root / "meta" / "info.json").stat().st_mtime_ns
    write_demonstrations(root, episodes=3)
    assert (root / "meta" / "info.json").stat().st_mtime_ns == written
    frames, instruction = demonstrate(1)
    data = open_demonstrations(root)
    first, length = int(data.episode_lengths[0]), len(frames["action"])
    sample = data[first + length - 2]
    assert sample["task"] == instruction
    assert torch.equal(sample["observation.state"], torch.from_numpy(frames["state"][-2]))
    assert torch.equal(sample["action"][:2], torch.from_numpy(frames["action"][-2:]))
    assert sample["action_is_pad"].tolist() == [False] * 2 + [True] * (CHUNK - 2)
    seen = sample[CAMERA].permute(1, 2, 0).numpy() * 255
    assert np.abs(seen - frames["image"][-2]).mean() < 8  # of 255: what the codec leaves
    data.close()


def test_the_robot_is_pushed_about_while_the_expert_shows_how_to_recover():
    frames, _ = demonstrate(0)
    moved = np.diff(frames["state"][:, :2], axis=0)
    way = frames["action"][:-1, :2] - frames["state"][:-1, :2]
    far = np.linalg.norm(way, axis=1, keepdims=True)
    assert np.abs(moved - way * np.minimum(1, REACH / np.maximum(far, 1e-9))).max() > 0.02


# --- the policy ------------------------------------------------------------------------------------------------------


def small_policy(folder):
    make_backbone(folder / "backbone")
    torch.manual_seed(0)
    return FlowVLA.on(folder / "backbone"), Processor(STATS)


def observe(processor, seeds):
    tables = Tables(seeds)
    images = torch.from_numpy(tables.images()).permute(0, 3, 1, 2) / 255
    observation = {CAMERA: images, "observation.state": torch.from_numpy(tables.state), "task": tables.instructions}
    return processor(observation)


def test_a_processor_scales_there_and_back_and_is_saved(tmp_path):
    Processor(STATS).save_pretrained(tmp_path)
    processor = Processor.from_pretrained(tmp_path)
    actions = torch.rand(2, CHUNK, 3)
    inputs = processor(
        {
            CAMERA: torch.rand(2, 3, 48, 48),
            "observation.state": torch.tensor([[0.5, 0.74, 0.4], [0.26, 0.5, 0.9]]),
            "action": actions,
            "action_is_pad": torch.zeros(2, CHUNK, dtype=torch.bool),
            "task": ["red puck on green pad", "blue puck on yellow pad"],
        }
    )
    torch.testing.assert_close(inputs["current_state"], torch.tensor([[0.0, 1, 0], [-1, 0, 1]]))
    torch.testing.assert_close(processor.actions(inputs["actions"]), actions)
    assert (inputs["input_ids"][0] != inputs["input_ids"][1]).sum() == 2, "the colours"


def test_actions_are_handed_out_one_by_one_and_looked_for_anew_when_they_are_used_up(tmp_path):
    policy, processor = small_policy(tmp_path)
    batch, other = observe(processor, [0, 1]), observe(processor, [2, 3])
    torch.manual_seed(1)
    chunk = policy.predict_action_chunk(batch)
    assert chunk.shape == (2, CHUNK, 3)
    torch.manual_seed(1)
    taken = [policy.select_action(batch if i == 0 else other) for i in range(EXECUTED + 1)]
    assert torch.equal(torch.stack(taken[:EXECUTED], dim=1), chunk[:, :EXECUTED])
    assert not torch.equal(taken[EXECUTED], chunk[:, EXECUTED])
    policy.reset()
    torch.manual_seed(1)
    assert torch.equal(policy.select_action(batch), chunk[:, 0])


@pytest.mark.full
@pytest.mark.ranks(2)
def test_a_sharded_policy_acts_as_the_whole_one_each_rank_on_its_own_tables(tmp_path):
    if dist.get_rank() == 0:
        make_backbone(tmp_path / "backbone")
    dist.barrier()
    whole, processor = small_policy(tmp_path)
    sharded, _ = small_policy(tmp_path)
    config = StrategyConfig(
        bf16=False,
        block_class_names=("GemmaDecoderLayer", "SiglipEncoderLayer", FlowBlock.__name__),
    )
    strategy = FSDPV2Strategy(config=config)
    sharded = strategy.prepare_model(sharded, is_training=True)
    paths = []
    for policy in (whole, sharded):
        path = []
        before = torch.get_rng_state()
        tables = Tables([UNSEEN + dist.get_rank()])
        drive(policy, processor, tables, dist.get_rank(), lambda t, p=path: p.append(t.state))
        assert torch.equal(torch.get_rng_state(), before)
        paths.append(np.stack(path))
    np.testing.assert_allclose(paths[0], paths[1], atol=1e-4)


# --- the whole way ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_robot_learns_its_task_though_a_rank_is_killed(tmp_path):
    """It is the program of docs/vla.md, made small: a minute on two cores, nothing on the table but what is named."""
    command = ["--run-dir", str(tmp_path / "run"), "--picture", str(tmp_path / "robot.png"), "--no-distractors"]
    command += ["--moving-picture", str(tmp_path / "robot.gif"), "--save-interval", "50"]
    command += ["--steps", "450", "--episodes", "200", "--eval-interval", "450", "--eval-episodes", "128"]
    seen = robot.run(*robot.arguments(command))
    assert seen["before"] <= 0.02 and seen["after"] >= 0.15  # seeds gave 0.36 and 0.45
    assert seen["again"] > 0
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "success.jsonl").read_text().splitlines()]
    assert {e["step"] for e in evaluations} == {0, 450} and {e["episodes"] for e in evaluations} == {128}
    policy, processor = (of.from_pretrained(tmp_path / "run" / "policy") for of in (FlowVLA, Processor))
    done = []
    for rank in range(2):
        seeds, noise_seed = trials(128, 42, 450, rank, 2)
        done.append(drive(policy, processor, Tables(seeds, distractors=False), noise_seed).mean())
    assert np.mean(done) == pytest.approx(seen["after"], abs=0.03), "the folder alone acts as the sharded policy did"
    assert (tmp_path / "robot.gif").read_bytes()[:3] == b"GIF" and (tmp_path / "robot.png").exists()
