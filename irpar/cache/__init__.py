"""The cache of partitions: what a command wrote is written again without planning, where nothing has changed.

A partition is found by a digest of all that it depends on (`key`), in a folder of the user (`folder`). An entry
(`entry`) holds the files that were written, but of weights only where they lie in the model (`weights`).
"""
