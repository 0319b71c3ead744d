"""The passes, one a module: the pass `fold-constants` is in `fold_constants`."""
