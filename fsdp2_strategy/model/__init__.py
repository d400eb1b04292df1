"""Properties and state of a model: wrapper, names, shards, placeholders, offloading, fingerprints."""
