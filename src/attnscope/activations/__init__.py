"""Records what MLPs and value projections compute, as sums over tokens."""
