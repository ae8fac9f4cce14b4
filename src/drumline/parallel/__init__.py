"""Ranks that compute together: collectives, groups, and who holds which part of a weight.

    comm      the `Comm` protocol, and what every implementation shares: order, ledger, errors
    solo      one rank
    shm       ranks on one host, over shared memory
    gloo      ranks anywhere, over torch.distributed
    groups    from a mesh to the comms of a rank

Results are the same bits whichever implementation carries them: sums are taken in rank order.
The room refuses to know requests, schedules, models and drafters.
"""
