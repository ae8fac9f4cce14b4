"""The scheduler, driven by a model that is a hash."""
