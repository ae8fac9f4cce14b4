"""One rank: load the checkpoint, size the cache, turn a plan into tensors and run it.

A worker executes what a plan says, in its order. It refuses to know why: no scheduling decision
is taken here.
"""
