"""Run VITRA's real training script on CPU ranks, with our strategy or its own; no file of VITRA is changed.

`folders` makes a tiny PaliGemma, episodes and a configuration in VITRA's formats. `run` starts the script on two ranks,
`child` is the program of a rank. `stubs` stands in for packages that are not installed, `redirections` for the
accelerator, `shims` gives transformers 5 what VITRA expects of transformers 4.47.
"""
