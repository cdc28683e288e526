"""How a search chooses the next variant."""
