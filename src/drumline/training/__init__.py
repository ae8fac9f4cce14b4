"""Drafters for a target: data that the target writes itself, heads trained on it, evaluation.

It drives the engine from outside, as any user could, and refuses to reach into a running one.
"""
