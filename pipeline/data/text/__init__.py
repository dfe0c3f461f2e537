"""Texts as numbers of tokens: tokenizers, windows of tokens, and the files that hold them."""
