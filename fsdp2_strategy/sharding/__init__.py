"""Plan which modules of a model become units of `fully_shard`, and shard the model by that plan."""
