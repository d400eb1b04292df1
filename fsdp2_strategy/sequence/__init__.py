"""Split the sequences of a batch over several ranks: sequence parallelism for models of transformers."""
