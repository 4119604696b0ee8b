"""Serving in simulated time: what a server of a hybrid model would get done on a device, under any memory policy.

``devices`` and ``roofline`` say how long a step takes, ``simulator`` is the engine, ``metrics`` what comes of a run;
``server`` puts a model, an engine and an arena together, ``search`` finds the best static split, ``planning`` what to
expect before there is a server. ``arrivals`` prepares traces, ``figures`` draws, ``command`` is the command line. A new
device is a line in a table of ``devices``, and so is a model; a new policy goes into :mod:`avmp.baselines`.
"""
