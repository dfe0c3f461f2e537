"""Texts as numbers of tokens: files, tokenizers and windows of tokens."""
