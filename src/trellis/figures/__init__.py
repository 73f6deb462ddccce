"""Numbers and pictures for people: what pages, terminals and messages show."""
