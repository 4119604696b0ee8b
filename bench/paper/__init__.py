"""The published AVMP experiment on a command line; see ``bench/README.md`` for what its figures are worth."""
