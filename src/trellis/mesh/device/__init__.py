"""A program of whole arrays as the program of one device."""
