"""Find the fastest right variant of each problem, and keep everything that was seen."""
