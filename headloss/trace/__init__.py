"""From a loss function to its graph: what it asks for, what it may read, and whether it combines rows."""
