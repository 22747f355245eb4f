"""The one engine behind sample, validate, serve and board: scheduler, cache, sampler."""
