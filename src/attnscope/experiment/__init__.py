"""From a file to a finished, resumable run, and back from its directory to tables."""
