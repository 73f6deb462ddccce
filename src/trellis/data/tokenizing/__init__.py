"""From files of documents to a token store. Workers load this folder without the rest of Trellis."""
