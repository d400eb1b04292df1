"""Simulate a table on which a magnet moves a puck to a pad, with an expert that gives demonstrations.

Input: seeds, and actions. Output: camera images, states, instructions, and whether the task is done.

The table has size 1 x 1. The instruction names one puck and one pad; the other two are optional distractors. The magnet
moves by at most `REACH` per step. While it is on, it lifts the nearest puck within `LIFT` and carries it; when switched
off, it drops the puck. All scenes of a `Tables` are simulated together; they are the first dimension of its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PUCKS = {"red": (214, 48, 49), "blue": (44, 92, 214)}
PADS = {"green": (120, 200, 130), "yellow": (240, 214, 110)}
WORDS = (*PUCKS, *PADS, "puck", "on", "pad")  # the vocabulary of instructions
SIZE = 48  # pixels of an image's side
FPS = 10
REACH, LIFT, ON_PAD = 0.1, 0.1, 0.12  # maximum distances: per step, to lift a puck, to be on a pad
LIMIT = 40  # maximum steps to do the task; the expert needs about 12
ACTION, STATE = ("x", "y", "magnet"), ("x", "y", "load")

_PUCK, _PAD, _MIN_DISTANCE = 0.07, 0.12, 0.3  # half sizes; minimum initial distance of pucks and pads
_TABLE, _DARK = np.array([240.0, 238.0, 232.0], np.float32), np.array([40.0, 40.0, 48.0], np.float32)

Floats = NDArray[np.float32]


class Tables:
    """Simulate one table per seed; each depends only on its own seed and actions.

    Args:
        seeds: one per scene.
        distractors: include the puck and the pad that the instruction does not name.
    """

    def __init__(self, seeds: Sequence[int], *, distractors: bool = True) -> None:
        scenes = [_Scene.sample(np.random.default_rng(seed)) for seed in seeds]
        self.magnet: Floats = np.stack([scene.positions[4] for scene in scenes])  # (n, xy)
        self.pucks: Floats = np.stack([scene.positions[:2] for scene in scenes])  # (n, 2, xy); the named one first
        self.pads: Floats = np.stack([scene.positions[2:4] for scene in scenes])
        if not distractors:
            self.pucks[:, 1] = self.pads[:, 1] = -1.0  # outside the image, out of reach
        self.colours = np.stack([scene.colours for scene in scenes])  # (n, 2): indices of the named puck's and pad's
        self.held = np.full(len(scenes), -1)  # index of the puck; -1: none
        self.instructions = [scene.instruction for scene in scenes]

    def __len__(self) -> int:
        return len(self.magnet)

    @property
    def state(self) -> Floats:
        """The robot's state, (n, 3): the magnet's position, and 1 if it carries a puck, else 0."""
        return np.concatenate([self.magnet, self.held[:, None] >= 0], axis=1).astype(np.float32)

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether the named puck lies on the named pad, (n,)."""
        distance = np.linalg.norm(self.pucks[:, 0] - self.pads[:, 0], axis=1)
        return (distance < ON_PAD) & (self.held != 0)

    def step(self, action: Floats, push: Floats | float = 0.0) -> None:
        """Advance all tables by one step.

        Args:
            action: (n, 3): the position to move to, by at most `REACH`; above 0, the last value switches the magnet on.
            push: (n, xy): a disturbance, added to the movement.
        """
        offset = action[:, :2] - self.magnet
        length = np.linalg.norm(offset, axis=1, keepdims=True)
        move = offset * np.minimum(1.0, REACH / np.maximum(length, 1e-9))
        self.magnet = np.clip(self.magnet + move + push, 0.0, 1.0).astype(np.float32)
        distances = np.linalg.norm(self.pucks - self.magnet[:, None], axis=2)  # (n, 2)
        lifted = np.where(distances.min(axis=1) < LIFT, distances.argmin(axis=1), -1)
        self.held = np.where(action[:, 2] > 0, np.where(self.held >= 0, self.held, lifted), -1)
        carrying = np.flatnonzero(self.held >= 0)
        self.pucks[carrying, self.held[carrying]] = self.magnet[carrying]

    def images(self) -> NDArray[np.uint8]:
        """Render the images of a camera above each table: RGB (n, SIZE, SIZE, 3)."""
        axis = (np.arange(SIZE, dtype=np.float32) + 0.5) / SIZE
        image = np.broadcast_to(_TABLE, (len(self), SIZE, SIZE, 3)).copy()

        def draw(at: Floats, colour: Floats, size: float, *, square: bool = False) -> None:
            dx, dy = (
                np.abs(axis[None, None, :] - at[:, 0, None, None]),
                np.abs(axis[None, :, None] - at[:, 1, None, None]),
            )
            distance = np.maximum(dx, dy) if square else np.sqrt(dx**2 + dy**2)  # (n, SIZE, SIZE)
            covered = np.clip((size - distance) * SIZE + 0.5, 0, 1)
            image[:] += covered[..., None] * (colour[:, None, None] - image)

        for i in range(2):
            draw(self.pads[:, i], np.array(list(PADS.values()), np.float32)[self.colours[:, 1] ^ i], _PAD, square=True)
        for i in range(2):
            draw(self.pucks[:, i], np.array(list(PUCKS.values()), np.float32)[self.colours[:, 0] ^ i], _PUCK)
        draw(self.magnet, np.broadcast_to(_DARK, (len(self), 3)), 0.03)
        return image.round().astype(np.uint8)


def expert(tables: Tables) -> Floats:
    """Return the expert's actions (n, 3) from the true positions; the magnet may be anywhere."""
    holds = tables.held == 0
    goal = np.where((holds | tables.done)[:, None], tables.pads[:, 0], tables.pucks[:, 0])
    distance = np.linalg.norm(goal - tables.magnet, axis=1)
    lifts = (distance < 1.5 * REACH) & (tables.held < 0) & ~tables.done
    on = np.where(holds, distance > ON_PAD / 2, lifts)
    return np.concatenate([goal, np.where(on, 1.0, -1.0)[:, None]], axis=1).astype(np.float32)


def demonstrate(
    seed: int, noise: float = 0.03, *, distractors: bool = True
) -> tuple[dict[str, NDArray[np.generic]], str]:
    """Return a demonstration: the expert does the task while random pushes disturb it, which shows how to recover.

    Args:
        seed: seed of the scene and of the pushes.
        noise: standard deviation of a push; also, in 3% of the steps the magnet is switched wrongly.
        distractors: see `Tables`.

    Returns:
        Images (T, SIZE, SIZE, 3), states (T, 3) and the expert's actions (T, 3); and the instruction.
    """
    tables, random = Tables([seed], distractors=distractors), np.random.default_rng((seed, 1))
    frames: dict[str, list[NDArray[np.generic]]] = {"image": [], "state": [], "action": []}
    steps_done = 0
    for _ in range(2 * LIMIT):
        action = expert(tables)
        for name, value in (("image", tables.images()), ("state", tables.state), ("action", action)):
            frames[name].append(value[0])
        steps_done += int(tables.done[0])
        if steps_done > 2:
            break
        is_mistake = random.random() < 0.03
        tables.step(action * [[1, 1, -1 if is_mistake else 1]], random.normal(0, noise, (1, 2)))
    return {name: np.stack(values) for name, values in frames.items()}, tables.instructions[0]


@dataclass(frozen=True)
class _Scene:
    positions: Floats
    """Positions of two pucks, two pads and the magnet, (5, xy)."""
    colours: NDArray[np.int64]
    """Indices of the named puck's and the named pad's colours, (2,)."""

    @classmethod
    def sample(cls, random: np.random.Generator) -> _Scene:
        positions = np.empty((0, 2), np.float32)
        while len(positions) < 4:
            position = random.uniform(0.13, 0.87, (1, 2)).astype(np.float32)
            if not len(positions) or np.linalg.norm(positions - position, axis=1).min() > _MIN_DISTANCE:
                positions = np.concatenate([positions, position])
            elif random.random() < 0.05:  # three objects may leave no space for a fourth
                positions = positions[:0]
        magnet = random.uniform(0.1, 0.9, (1, 2)).astype(np.float32)
        colours = random.integers(2, size=2)
        return cls(np.concatenate([positions, magnet]), colours)

    @property
    def instruction(self) -> str:
        return f"{list(PUCKS)[self.colours[0]]} puck on {list(PADS)[self.colours[1]]} pad"
