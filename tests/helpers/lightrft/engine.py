"""Stand in for SGLang in LightRFT's script; `register` is the one place to choose another engine."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.distributed.tensor import DTensor

from fsdp2_strategy.rollout import ENGINES, TransformersEngine


class LocalEngine(TransformersEngine):
    """Generate with a copy of the actor on this rank, called as SGLang is; count the updates."""

    made: ClassVar = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made.append(self)
        self.updates = 0

    def update_weights(self, weights):
        super().update_weights(weights)
        self.updates += 1


class ScriptedEngine:
    """Generate tokens that depend on prompt and call only, so that two strategies train on equal data.

    It takes the weights of both strategies: a stream of pairs, and LightRFT's one call for each parameter.
    """

    def __init__(self, words, answers, end):
        self._words, self._answers, self._end = words, answers, end
        self._seen = {}
        self.is_asleep = False

    def update_weights(self, weights):
        for _ in weights:
            pass

    def update_weights_from_tensor(self, name, tensor, flush_cache=False):
        """Take one parameter, as LightRFT's own strategy sends it."""
        assert isinstance(tensor, torch.Tensor | DTensor)

    def sleep(self, *_):
        self.is_asleep = True

    def wake_up(self, *_):
        self.is_asleep = False

    def generate(self, *, sampling_params, input_ids, image_data=None):
        assert not self.is_asleep, "woken before it generates"
        outputs = []
        for ids in input_ids:
            key = tuple(ids)
            self._seen[key] = self._seen.get(key, 0) + 1
            seed = sum((i + 1) * token for i, token in enumerate(ids)) * 1000 + self._seen[key]
            generator = torch.Generator().manual_seed(seed)
            length = int(torch.randint(3, sampling_params["max_new_tokens"] - 1, (1,), generator=generator))
            words = torch.randint(len(self._words), (length,), generator=generator).tolist()
            answer = self._answers[int(torch.randint(len(self._answers), (1,), generator=generator))]
            outputs.append({"output_ids": [*(self._words[i] for i in words), answer, self._end]})
        return outputs


def register(scripted, **options):
    """Make the engine that the script asks for as "sglang"."""
    if scripted:
        ENGINES["sglang"] = lambda args, actor, dtype: ScriptedEngine(**options)
    else:
        ENGINES["sglang"] = lambda args, actor, dtype: LocalEngine(actor, dtype=dtype, tokenizer=args.pretrain)
