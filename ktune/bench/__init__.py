"""Is a kernel right, how fast is it, and what do users have today."""
