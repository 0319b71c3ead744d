"""How ranks of one machine talk: memory that all of them map, semaphores in it, and what moves over these.

From the bottom: `semaphores`; `segment`, which says what lies where; `streams` of records between two ranks; `watch`,
which finds out why nothing comes; `slots`, where data lies on its way; `transfers`, `prompt`, `moves` and `reductions`,
the collectives of one rank; `quick` and `quick_reduction`, the same from the second time on; `traffic`, which keeps all
of it moving; `joining`, where ranks find each other.
"""
