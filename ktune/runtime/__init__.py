"""What runs in a user's program: dispatch, launch and the public torch-shaped functions."""
