"""What ranks may hold: passes that only make programs faster do not act where they would hold more."""

from irpar.ir import Module, clone_module

from .pipeline import Pass, PassResult, PassWithinLimit


def run_within_limit(pass_: Pass, module: Module) -> PassResult:
    """Run a pass, but one that may do without where a rank would then hold more than the module's memory limit.

    What is held already may be above the limit: the pass then may not add to it. In global view nobody knows yet what a
    rank holds.
    """
    limit = module.memory_limit
    if limit is None or not isinstance(pass_, PassWithinLimit) or not module.is_local:
        return pass_.run(module)
    trial = clone_module(module)
    tried = pass_.run(trial)
    if not tried.changed:
        return tried
    most = pass_.most_held(trial)
    if most > max(limit, pass_.most_held(module)):
        return PassResult(False, notes=(above_limit(most, limit),))
    return pass_.run(module)


def above_limit(most: int, limit: int) -> str:
    """The note of what was not done, after which a rank would hold so many bytes."""
    return f"not done: a rank would hold {most:,} bytes, the memory limit is {limit:,}"
