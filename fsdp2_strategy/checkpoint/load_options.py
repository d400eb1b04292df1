"""The options that skip a part of a load, as error messages name them.

The first name is that of ``strategy.load_ckpt``; the name in parentheses is that of the function `load_checkpoint`.
"""

NOT_STRICT = "load_module_strict=False (load_checkpoint: strict=False)"
NO_OPTIMIZER = "load_optimizer_states=False (load_checkpoint: optimizer=None)"
NO_SCHEDULER = "load_lr_scheduler_states=False (load_checkpoint: scheduler=None)"
