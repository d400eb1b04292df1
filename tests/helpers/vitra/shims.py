"""Give transformers 5 what VITRA expects of transformers 4.47; one row each in `SHIMS`.

VITRA calls the parts of a PaliGemma itself: it embeds text, state and field of view, and passes the result to the
language model. So it depends on where the parts are, and on which of them scales embeddings by sqrt(hidden_size).
"""

from __future__ import annotations

import torch

SHIMS = {
    "language_model, vision_tower": "attributes of PaliGemmaForConditionalGeneration; they are now attributes of its "
    "`model`, and the language model has no head (`language_model.model` was the part without it)",
    "num_logits_to_keep": "an argument of the language model with a head, whose logits VITRA does not use",
    "_update_causal_mask": "a method of PaliGemmaForConditionalGeneration: every token attends to all that are not "
    "padding",
    "get_image_features": "returned the features divided by sqrt(hidden_size); it now returns an output whose "
    "`pooler_output` are the features, undivided",
    "embed_scale": "the language model scaled its inputs by sqrt(hidden_size); its word embedding now does, which "
    "would leave VITRA's own embeddings (cognition token, field of view) unscaled",
    "attn_implementation": "Gemma 2 computed attention with `eager` by default, which caps its logits; `sdpa`, now the "
    "default, does not",
}
"""What transformers 5 changed, and what it was."""


def install():
    """Add the old names and the old arithmetic to PaliGemmaForConditionalGeneration; nothing in transformers 4."""
    import transformers
    from transformers import PaliGemmaForConditionalGeneration as PaliGemma

    if transformers.__version__.startswith("4."):
        return
    features, load = PaliGemma.get_image_features, PaliGemma.from_pretrained.__func__

    def get_image_features(self, pixel_values):
        return features(self, pixel_values).pooler_output / _scale(self)

    def from_pretrained(cls, *args, **kwargs):
        model = load(cls, *args, **kwargs)
        embedding = model.get_input_embeddings()
        embedding.scalar_embed_scale = 1.0
        embedding.embed_scale.fill_(1.0)
        model.model.language_model.set_attn_implementation("eager")
        return model

    PaliGemma.language_model = property(LanguageModel)
    PaliGemma.vision_tower = property(lambda self: self.model.vision_tower)
    PaliGemma.get_image_features = get_image_features
    PaliGemma.from_pretrained = classmethod(from_pretrained)
    PaliGemma._update_causal_mask = _mask


def _scale(paligemma):
    return paligemma.config.text_config.hidden_size**0.5


class LanguageModel:
    """The language model of a PaliGemma, as transformers 4.47 had it."""

    def __init__(self, paligemma):
        self.model = paligemma.model.language_model
        self._scale = _scale(paligemma)

    def __call__(self, inputs_embeds, num_logits_to_keep, **inputs):
        return self.model(inputs_embeds=inputs_embeds * self._scale, **inputs)


def _mask(self, attention_mask, token_type_ids, past_key_values, cache_position, input_ids, inputs_embeds, is_training):
    assert not is_training and past_key_values is None and token_type_ids is None
    length = inputs_embeds.shape[1]
    lowest = torch.finfo(self.dtype).min
    mask = torch.zeros(len(inputs_embeds), 1, length, length, dtype=self.dtype, device=inputs_embeds.device)
    return mask.masked_fill(~attention_mask[:, None, None, :].bool(), lowest)
