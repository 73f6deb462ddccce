"""What a run is: one frozen value, from a recipe, a YAML file and the command line."""
