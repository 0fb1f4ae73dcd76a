"""Figures of runs: one file each, which declares `FIGURE`."""
