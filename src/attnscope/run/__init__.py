"""Run directories: layout, reading and writing, without torch."""
