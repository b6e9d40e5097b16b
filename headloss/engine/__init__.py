"""One call: its arguments, its plan, the loss on its rows, and the passes over the vocabulary."""
