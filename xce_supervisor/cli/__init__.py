"""argv in, exit code out: the verbs of both programs. No decisions."""
