"""The wall: the tables of a run, how they are written and how they are read. No torch."""
