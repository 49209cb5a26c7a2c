"""How the strategy tensor divides a model: the plan, regions of layers, and streams of positions."""
