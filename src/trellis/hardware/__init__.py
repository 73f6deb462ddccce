"""Chips and their rates, slices and nodes of them, and this machine."""
