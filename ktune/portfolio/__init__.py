"""Few variants for many problems: pure functions over measurements."""
