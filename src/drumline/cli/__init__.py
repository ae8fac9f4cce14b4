"""The verbs of the command `drumline`.

A verb parses, calls one function of the rooms below and prints. Nothing heavy is imported before
a verb needs it, so that `--help` answers at once.
"""
