"""The ledger: every result is a version, and none is ever overwritten."""
