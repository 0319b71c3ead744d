"""Recompute (rematerialisation): which results are computed again rather than held, so that a step fits a budget.

On an abstract graph of what runs in which order: nodes with a cost and the bytes of their results. A schedule is a
list of its nodes; one that comes again is recomputed.
"""

from .graph_tree import FoundSchedules, GraphTree, solve_tree
from .simulation import Outcome, simulate
from .solution import METHODS, Solution, TooSmallError, solve
from .training_graph import RecomputeError, TrainingGraph, TrainingNode, read_graph, write_graph

__all__ = [
    "METHODS",
    "FoundSchedules",
    "GraphTree",
    "Outcome",
    "RecomputeError",
    "Solution",
    "TooSmallError",
    "TrainingGraph",
    "TrainingNode",
    "read_graph",
    "simulate",
    "solve",
    "solve_tree",
    "write_graph",
]
