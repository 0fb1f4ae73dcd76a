"""The words of the definitions, one idea per file: its function, and its declaration."""
