"""Which rows are read, and in which order: a pure function of the seed and the position."""
