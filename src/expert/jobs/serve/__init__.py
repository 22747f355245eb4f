"""expert serve: trained experts behind an OpenAI-compatible endpoint."""
