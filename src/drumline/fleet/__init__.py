"""`Replica.step()`, the only loop over steps, and what surrounds it.

The executor, the channel and the clock are handed in, so the engine and a simulator drive the
same code. This room refuses to know tensors, processes and sockets.
"""
