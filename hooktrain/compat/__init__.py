"""The names of other frameworks, for scripts that were written for them."""
