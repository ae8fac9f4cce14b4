"""The nouns that cross rooms: frozen values, keyed randomness, the clock, the error tree.

Knows no other room.
"""
