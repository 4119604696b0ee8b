"""The serving study: models, traces and rates, under every memory policy, in simulated time."""
