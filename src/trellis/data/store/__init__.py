"""Token stores: every token of a corpus, with any range or document one read away; and other projects' formats."""
