"""Where trials are kept: Optuna's storage, shared by processes and machines."""
