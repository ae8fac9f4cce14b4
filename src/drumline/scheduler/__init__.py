"""Who runs in the next step, and with how many tokens.

Continuous batching, chunked prefill, priorities, preemption, limits. This room decides from
counts and numbers of arrival alone; it refuses to know tensors, text, ranks and wall clocks.
"""
