"""Optimizers: parameter groups, fp32 masters, learning rates, one step over all gradients, averages of weights."""
