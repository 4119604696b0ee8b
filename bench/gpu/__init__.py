"""One command that turns one NVIDIA GPU into numbers: ``python -m bench.gpu``."""
