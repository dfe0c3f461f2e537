"""Sound: files, their format, and vowels made by a formula."""
