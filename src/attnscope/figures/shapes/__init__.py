"""Shapes: how rows of data become a chart. A shape reads no run and names no measure."""
