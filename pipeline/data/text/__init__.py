"""Texts as sequences of tokens: files, tokenizers and windows of tokens."""
