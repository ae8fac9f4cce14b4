"""Drafters: guesses of what the target will say next, one file per method.

`base` is the contract. A drafter sees what was committed and proposes; it refuses to know whether
its guesses are accepted, and nothing it does can change a token that is emitted.
"""
