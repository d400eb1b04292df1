"""Hugging Face folders: load their weights into models and export models to them, each rank its own byte ranges.

Loading: `weights_folder` -> `conversions` -> `load_plan` -> `load`. Saving: `save_plan` -> `export`. Both use `regions`
(descriptions of tensors), `verified_read`, `write` and `safetensors_format`. `meta` builds models on the meta device,
`peft` handles adapters. Only this package imports transformers' model code.
"""
