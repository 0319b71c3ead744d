"""Bad models, shardings and partitions: `python -m tests.hostile` hands each to the real command line."""
