"""Measurements: every number the documentation states is printed by a command from here.

It drives the engine from outside and refuses to reach into it.
"""
