"""Models as objects: wrappers, names, locations of values, offloading, fingerprints; not sharding plans."""
