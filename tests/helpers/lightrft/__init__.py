"""Run LightRFT's real script on CPU ranks, with our strategy or its own; no file of LightRFT is changed.

`child` is the program of a rank. `stubs` stands in for packages that are not installed, `redirections` for the
accelerator, `renames` for names that transformers 5 has dropped, `engine` for SGLang. `run` makes folders and starts
the ranks.
"""
