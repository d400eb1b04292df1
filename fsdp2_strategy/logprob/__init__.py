"""Compute the log-probability of each token of sequences, with the logits of only a few rows at a time."""

from fsdp2_strategy.logprob.linear import linear_log_probs
from fsdp2_strategy.logprob.logit_shape import LogitShape
from fsdp2_strategy.logprob.tokens import token_log_probs

__all__ = ["LogitShape", "linear_log_probs", "token_log_probs"]
