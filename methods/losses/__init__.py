"""The losses of the methods, written twice: as the formulas read, and fast."""
