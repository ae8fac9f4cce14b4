"""The one place that states the version; the build, the package and the changelog test read it."""

__version__ = "0.1.0"
