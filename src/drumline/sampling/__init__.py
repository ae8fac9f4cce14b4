"""From logits to tokens: processors, keyed draws, log-probabilities.

Each row is computed from its own logits, history and key. This room refuses to know who else is
in the batch, and it holds no generator with a state.
"""
