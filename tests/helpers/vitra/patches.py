"""What no seed of VITRA reaches: one function each, applied on request before the script runs.

`seeded_colours`: VITRA draws its changes of colour from `numpy.random.default_rng()`, which the operating system seeds.
So no two runs with augmentation see the same images, with any strategy. With this function they are drawn from numpy's
global state, as all its other augmentation is.
"""

from __future__ import annotations

import functools


def seeded_colours():
    import numpy as np
    from vitra.datasets import augment_utils

    augment_utils.apply_color_augmentation = functools.partial(augment_utils.apply_color_augmentation, rng=np.random)
