"""Hugging Face folders: models on meta that remember theirs, weights in and out, each rank its own byte ranges.

folder, twin -> conversions -> load, initialize · export, over region (descriptions of tensors), read, write and
container (the file format). The only place that imports transformers' model code.
"""
