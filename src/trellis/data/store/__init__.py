"""Token stores: every token of a corpus, any range or document of it one read away; and the formats of others."""
