"""From logits to tokens: processors, keyed draws, log-probabilities.

Rows are (sequence, position) pairs, each with its own parameters and its own history. A row's
result is a function of its logits, its request and its history alone: never of the other rows,
of the row's place among them, of threads or of memory layout (promise P1). Works on the host,
in numpy, one contiguous row at a time; knows no model, schedule, rank or text.
"""
