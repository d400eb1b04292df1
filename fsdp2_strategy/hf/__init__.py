"""Load and export Hugging Face folders; each rank reads and writes its own byte ranges.

Loading: `weights_folder` -> `conversions` -> `load_plan` -> `load`. Saving: `save_plan` and
`output_files` -> `export`. Both use `regions` (descriptions of tensors) and `safetensors_format`. Loads read with
`verified_read`; saves write with `write`. `meta` builds models on the meta device, and `peft` handles adapters. Only
this package imports transformers' model code.
"""
