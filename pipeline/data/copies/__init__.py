"""Copies of files from mirrors and addresses, with their checksums."""
