"""What passes and the runtime ask of a graph: types, placement, redistribution, costs, memory, parts and the plan."""
