"""Changes of VITRA that comparisons need: one function each, applied on request before the script runs.

`open_gates`: VITRA's action model starts with gates and an output layer of zeros. So the first losses depend neither on
images nor on texts, and hardly in the next steps. With this function, these layers start with random numbers.

`seeded_colours`: VITRA draws its changes of colour from `numpy.random.default_rng()`, which the operating system seeds.
So no two runs with augmentation see the same images, with any strategy. With this function they are drawn from numpy's
global state, as all its other augmentation is.
"""

from __future__ import annotations

import functools


def open_gates():
    import torch
    from vitra.models.action_model.dit import DiT

    initialize = DiT.initialize_weights

    def initialize_weights(self):
        initialize(self)
        for name, parameter in self.named_parameters():
            if "adaLN_modulation" in name or "final_layer" in name:
                torch.nn.init.normal_(parameter, std=0.1)

    DiT.initialize_weights = initialize_weights


def seeded_colours():
    import numpy as np
    from vitra.datasets import augment_utils

    augment_utils.apply_color_augmentation = functools.partial(augment_utils.apply_color_augmentation, rng=np.random)
