"""The HTTP surface that OpenAI clients speak.

It translates requests and streams answers. It refuses to know how a token is made.
"""
