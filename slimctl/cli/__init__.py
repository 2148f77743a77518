"""The command line. It parses, calls and prints; typer and rich live here and nowhere else."""
