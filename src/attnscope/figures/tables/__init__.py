"""Figures of tables that no run holds: one file each, which declares `FIGURE`."""
