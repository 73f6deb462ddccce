"""The description of a run: one frozen value, from a recipe, a YAML file and the command line."""
