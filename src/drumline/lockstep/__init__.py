"""How ranks come to take every step from one plan.

With one rank, as in this release, sealing a proposal is a function call. This room refuses to
know transports and tensors: it maps values to values.
"""
