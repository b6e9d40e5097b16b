"""A call as one operator, for compiled and exported graphs."""
