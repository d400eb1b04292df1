"""Models as objects: wrappers, names, where values are, offloading, fingerprints; nothing about sharding plans."""
