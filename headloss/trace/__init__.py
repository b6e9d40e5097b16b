"""What a loss asks for, what it may read, its graph, and how its rows meet."""
