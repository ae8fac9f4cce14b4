"""The command line, as newcomers type it."""
