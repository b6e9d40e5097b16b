"""From a loss function to its graph: what it asks for, what it may read, and which rows it combines."""
