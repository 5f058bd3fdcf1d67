"""xce-supervisor: the scheduler runs exactly where the primary is."""

__version__ = "0.1.0"
