"""A simulated table: a magnet is to put the puck of one colour on the pad of another, and an expert shows how.

Input: seeds, and actions. Output: camera images, states, instructions, and whether the task is done.

Two pucks and two pads lie on a table of 1 x 1, and the instruction names one of each; the other two are there to be
told apart, or are not there. The magnet moves by at most `REACH` a step. While it is on, it lifts the nearest puck
within `LIFT` and carries it along; where it goes off, the puck lies. All scenes of a `Tables` go on at the same time:
arrays have them in their first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PUCKS = {"red": (214, 48, 49), "blue": (44, 92, 214)}
PADS = {"green": (120, 200, 130), "yellow": (240, 214, 110)}
WORDS = (*PUCKS, *PADS, "puck", "on", "pad")  # of instructions
SIZE = 48  # of an image
FPS = 10
REACH, LIFT, ON_PAD = 0.1, 0.1, 0.12  # distances: of a step, at which a puck is lifted, at which it is on a pad
LIMIT = 40  # steps in which the task is to be done; the expert needs about 12
ACTION, STATE = ("x", "y", "magnet"), ("x", "y", "load")

_PUCK, _PAD, _APART = 0.07, 0.12, 0.3  # half sizes, and how far from each other things lie at first
_TABLE, _DARK = np.array([240.0, 238.0, 232.0], np.float32), np.array([40.0, 40.0, 48.0], np.float32)

Floats = NDArray[np.float32]


class Tables:
    """Simulate one table a seed; the same seeds are the same tables, whatever others stand beside them.

    Args:
        seeds: of the scenes.
        distractors: whether the other puck and the other pad are there.
    """

    def __init__(self, seeds: Sequence[int], *, distractors: bool = True) -> None:
        scenes = [_Scene.drawn(np.random.default_rng(seed)) for seed in seeds]
        self.magnet: Floats = np.stack([scene.places[4] for scene in scenes])  # (n, xy)
        self.pucks: Floats = np.stack([scene.places[:2] for scene in scenes])  # (n, 2, xy); the first is the named one
        self.pads: Floats = np.stack([scene.places[2:4] for scene in scenes])
        if not distractors:
            self.pucks[:, 1] = self.pads[:, 1] = -1.0  # out of sight and reach
        self.colours = np.stack([scene.colours for scene in scenes])  # (n, 4), of pucks and pads
        self.held = np.full(len(scenes), -1)  # which puck; -1 for none
        self.instructions = [scene.instruction for scene in scenes]

    def __len__(self) -> int:
        return len(self.magnet)

    @property
    def state(self) -> Floats:
        """What the robot feels, (n, 3): where its magnet is, and 1 where that carries something."""
        return np.concatenate([self.magnet, self.held[:, None] >= 0], axis=1).astype(np.float32)

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether the named puck lies on the named pad, (n,)."""
        off = np.linalg.norm(self.pucks[:, 0] - self.pads[:, 0], axis=1)
        return (off < ON_PAD) & (self.held != 0)

    def step(self, action: Floats, push: Floats | float = 0.0) -> None:
        """Take one step each.

        Args:
            action: (n, 3): where to go, which is reached in one step from within `REACH`; above 0, the magnet is on.
            push: (n, xy): by how much something else moves the magnet, too.
        """
        way = action[:, :2] - self.magnet
        far = np.linalg.norm(way, axis=1, keepdims=True)
        move = way * np.minimum(1.0, REACH / np.maximum(far, 1e-9))
        self.magnet = np.clip(self.magnet + move + push, 0.0, 1.0).astype(np.float32)
        off = np.linalg.norm(self.pucks - self.magnet[:, None], axis=2)  # (n, 2)
        lifted = np.where(off.min(axis=1) < LIFT, off.argmin(axis=1), -1)
        self.held = np.where(action[:, 2] > 0, np.where(self.held >= 0, self.held, lifted), -1)
        carries = np.flatnonzero(self.held >= 0)
        self.pucks[carries, self.held[carries]] = self.magnet[carries]

    def images(self) -> NDArray[np.uint8]:
        """Draw what a camera above the tables sees: RGB (n, SIZE, SIZE, 3)."""
        axis = (np.arange(SIZE, dtype=np.float32) + 0.5) / SIZE
        image = np.broadcast_to(_TABLE, (len(self), SIZE, SIZE, 3)).copy()

        def draw(at: Floats, colour: Floats, size: float, *, square: bool = False) -> None:
            dx, dy = (
                np.abs(axis[None, None, :] - at[:, 0, None, None]),
                np.abs(axis[None, :, None] - at[:, 1, None, None]),
            )
            far = np.maximum(dx, dy) if square else np.sqrt(dx**2 + dy**2)  # (n, SIZE, SIZE)
            covered = np.clip((size - far) * SIZE + 0.5, 0, 1)
            image[:] += covered[..., None] * (colour[:, None, None] - image)

        for i in range(2):
            draw(self.pads[:, i], np.array(list(PADS.values()), np.float32)[self.colours[:, 1] ^ i], _PAD, square=True)
        for i in range(2):
            draw(self.pucks[:, i], np.array(list(PUCKS.values()), np.float32)[self.colours[:, 0] ^ i], _PUCK)
        draw(self.magnet, np.broadcast_to(_DARK, (len(self), 3)), 0.03)
        return image.round().astype(np.uint8)


def expert(tables: Tables) -> Floats:
    """Return what one does who knows where everything lies, (n, 3); from wherever others have brought the magnet."""
    holds = tables.held == 0
    goal = np.where((holds | tables.done)[:, None], tables.pads[:, 0], tables.pucks[:, 0])
    far = np.linalg.norm(goal - tables.magnet, axis=1)
    lifts = (far < 1.5 * REACH) & (tables.held < 0) & ~tables.done
    on = np.where(holds, far > ON_PAD / 2, lifts)
    return np.concatenate([goal, np.where(on, 1.0, -1.0)[:, None]], axis=1).astype(np.float32)


def demonstrate(
    seed: int, noise: float = 0.03, *, distractors: bool = True
) -> tuple[dict[str, NDArray[np.generic]], str]:
    """Let the expert do the task once, while the robot is pushed about; it shows how to recover.

    Args:
        seed: of the scene and of the pushes.
        noise: standard deviation of a push; about a step in thirty the magnet goes on or off by mistake.
        distractors: see `Tables`.

    Returns:
        Images (T, SIZE, SIZE, 3), states (T, 3) and what the expert did about each, (T, 3); and the instruction.
    """
    tables, random = Tables([seed], distractors=distractors), np.random.default_rng((seed, 1))
    frames: dict[str, list[NDArray[np.generic]]] = {"image": [], "state": [], "action": []}
    after = 0
    for _ in range(2 * LIMIT):
        action = expert(tables)
        for name, value in (("image", tables.images()), ("state", tables.state), ("action", action)):
            frames[name].append(value[0])
        after += int(tables.done[0])
        if after > 2:
            break
        slips = random.random() < 0.03
        tables.step(action * [[1, 1, -1 if slips else 1]], random.normal(0, noise, (1, 2)))
    return {name: np.stack(values) for name, values in frames.items()}, tables.instructions[0]


@dataclass(frozen=True)
class _Scene:
    places: Floats
    """Of two pucks, two pads and the magnet, (5, xy)."""
    colours: NDArray[np.int64]
    """Of pucks and pads, (4,)."""

    @classmethod
    def drawn(cls, random: np.random.Generator) -> _Scene:
        places = np.empty((0, 2), np.float32)
        while len(places) < 4:
            place = random.uniform(0.13, 0.87, (1, 2)).astype(np.float32)
            if not len(places) or np.linalg.norm(places - place, axis=1).min() > _APART:
                places = np.concatenate([places, place])
            elif random.random() < 0.05:  # three can lie so that there is no place for a fourth
                places = places[:0]
        magnet = random.uniform(0.1, 0.9, (1, 2)).astype(np.float32)
        colours = random.integers(2, size=2)
        return cls(np.concatenate([places, magnet]), colours)

    @property
    def instruction(self) -> str:
        return f"{list(PUCKS)[self.colours[0]]} puck on {list(PADS)[self.colours[1]]} pad"
