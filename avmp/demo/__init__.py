"""A small serving engine over one arena, complete enough to show how an engine calls avmp: ``python -m avmp demo``.

``model.py`` is a hybrid model of Mamba-2 and attention layers with random weights; ``memories.py`` is where its caches
live, in an arena or plainly; ``engine.py`` is continuous batching; ``report.py`` is what the command prints and draws.
"""
