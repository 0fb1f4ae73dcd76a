"""The words of the definitions, one idea per file: pure functions of the kernels' totals."""
