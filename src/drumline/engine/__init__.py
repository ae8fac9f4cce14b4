"""The engine as scripts and servers see it: `LLM`, intake, text in and text out.

This room joins deciding and computing. It refuses to know HTTP and terminals.
"""
