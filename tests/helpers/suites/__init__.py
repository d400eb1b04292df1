"""The own test suites of TRL and transformers, run with this package's trainers in the place of theirs.

Input: checkouts named by FSDP2_PEERS. Output: the tests that pass with their trainers and not with ours. `run` is the
command, `plugin` replaces the trainers, and expected.json lists the differences that are documented.
"""
