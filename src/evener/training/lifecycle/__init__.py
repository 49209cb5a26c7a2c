"""When a run saves, stops, goes back, or hands over to a new rank."""
